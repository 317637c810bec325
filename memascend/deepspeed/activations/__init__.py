"""Saved activations, around DeepSpeed's engine and its activation checkpoints."""
