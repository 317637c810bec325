"""Files of a checkpoint: written, verified, divided otherwise, converted; not DeepSpeed."""
