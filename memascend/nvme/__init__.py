"""The store: tensors by key on one or several drives, and the part of them kept in memory."""
