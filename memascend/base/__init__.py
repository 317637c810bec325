"""Names, units and interfaces that every other folder uses; imports nothing of ours but errors."""
