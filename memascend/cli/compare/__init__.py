"""The compare command: the same run with stock DeepSpeed and with memascend, side by side."""
