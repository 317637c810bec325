"""Gradients: sums in the drive, and the parts of a sum that wait for each other."""
