"""Kernels over flat tensors, on the CPU and in Triton."""
