"""From a configuration with a block to a running attachment."""
