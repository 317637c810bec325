"""An emulated accelerator, "sim", with CUDA's rules of order: docs/design/testing.md."""
