"""Arithmetic before anything is allocated; neither torch nor DeepSpeed."""
