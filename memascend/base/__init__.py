"""Words, units and interfaces that every other folder uses; knows nothing of ours but errors."""
