"""Parameters: shards between drive and host, and the slots they are read into."""
