"""The volume command: format, wipe and measure volumes."""
