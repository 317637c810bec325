"""The memascend block of the DeepSpeed JSON; imports neither torch nor DeepSpeed."""
