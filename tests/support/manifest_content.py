"""A manifest as a checkpoint has it, to be changed by tests."""

from __future__ import annotations

from typing import Any

from memascend.checkpoint.manifest import VERSION


def manifest_content(tensors: list[dict[str, Any]], files: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one rank with one sub-group of 100 elements.

    Args:
        tensors: Each with its state, dtype and file.
        files: Each with its name, nbytes and crc32.
    """
    return {
        "format": "memascend checkpoint",
        "version": VERSION,
        "memascend": "0.1.0",
        "rank": 0,
        "world": 1,
        "global_step": 7,
        "optimizer": "DeepSpeedCPUAdam",
        "optimizer_step": 6,
        "sub_groups": [{"name": "0_4", "numel": 100}],
        "tensors": [{"sub_group": 0, "numel": 100} | tensor for tensor in tensors],
        "files": files,
    }
