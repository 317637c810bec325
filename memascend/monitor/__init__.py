"""The status of a running job: what each rank writes, where it lies, and how it is read."""
