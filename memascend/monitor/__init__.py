"""The status of a running job: its contents, its files, and their readers."""
