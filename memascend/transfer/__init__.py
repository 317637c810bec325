"""Staging: tensors of any size pass between drive and device in chunks of fixed size."""
