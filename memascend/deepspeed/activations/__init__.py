"""What forward saves for backward, around DeepSpeed's engine and its checkpoints."""
