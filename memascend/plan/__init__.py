"""Arithmetic before anything is allocated: host bytes, drive bytes, bytes moved; neither torch nor DeepSpeed."""
