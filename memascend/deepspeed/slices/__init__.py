"""Slices of the batch around DeepSpeed's engine: weights stay gathered, gradients come once."""
