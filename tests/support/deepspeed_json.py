"""A DeepSpeed JSON that works with memascend, and others that differ from it by one key."""

from __future__ import annotations

import copy
from typing import Any

WORKING: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/drive"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/drive"},
    },
    "aio": {"block_size": 1 << 20},
    "memascend": {},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return it with one key set; a dot leads into a section, which is made where it is missing."""
    config = copy.deepcopy(WORKING)
    *parents, last = path.split(".")
    section = config
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    return config


def without(path: str) -> dict[str, Any]:
    """Return it without one key."""
    config = changed(path, None)
    *parents, last = path.split(".")
    section = config
    for name in parents:
        section = section[name]
    del section[last]
    return config
