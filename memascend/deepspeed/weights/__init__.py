"""The 16-bit weights of a whole model: exported, and loaded from pretrained files."""
