"""Host memory of ours: the arena, and slots in it."""
