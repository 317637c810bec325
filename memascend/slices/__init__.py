"""A layer computes the batch in slices: rules for cutting, and the autograd function."""
