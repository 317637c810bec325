"""The optimizer: tiles of master weights and states, stepped between two transfers."""
