"""Passes an engine's step times to the status of its rank and to DeepSpeed's monitor."""
