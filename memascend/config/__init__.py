"""The memascend block of the DeepSpeed JSON; neither torch nor DeepSpeed."""
