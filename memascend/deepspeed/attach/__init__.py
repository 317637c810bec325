"""Builds a model's attachment from a configuration with a block."""
