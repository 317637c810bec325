"""Adapters between DeepSpeed and our data paths. Only `seams` assigns to DeepSpeed."""
