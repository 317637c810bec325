"""The sections of the block, by name; plain values for whoever must not import the product."""

from __future__ import annotations

SECTIONS = (
    "allocator",
    "buffer_pool",
    "direct_nvme",
    "overflow_check",
    "streaming.gradients",
    "streaming.optimizer",
    "streaming.parameters",
)
