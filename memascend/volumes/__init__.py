"""Directories and raw devices: checked, claimed, measured, ready for the store to open."""
