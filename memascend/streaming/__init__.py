"""The data paths between drive, host and device. They know torch, never DeepSpeed."""
