"""The memascend block of the DeepSpeed JSON: models, units, messages; neither torch nor DeepSpeed."""
