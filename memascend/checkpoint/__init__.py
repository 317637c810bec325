"""Checkpoint files: write, verify, re-divide and convert them. Never knows DeepSpeed."""
