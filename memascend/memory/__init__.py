"""Host memory: the arena's allocator, and slots in its memory."""
