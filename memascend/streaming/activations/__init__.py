"""Activations: storages that forward saves for backward."""
