"""The `memascend` command: one file per sub-command, the only place of the package that prints."""
