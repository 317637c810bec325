"""A plan for the live optimizer."""
