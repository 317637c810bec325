"""Saving and loading checkpoints around DeepSpeed's own functions."""
