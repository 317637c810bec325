"""The store: tensors by key on one or several drives, and the resident cache in front of it."""
