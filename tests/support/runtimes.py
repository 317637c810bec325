"""A stand-in for a runtime whose device is the CPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from memascend.base.interfaces import Device
from memascend.config.block import MemAscendConfig
from memascend.memory.guard import Guard
from memascend.streaming.gradients.on_device import GradientsOnDevice


def stand_in(lock: Any = None, **parts: Any) -> SimpleNamespace:
    """Return the parts that a test needs, beside a lock and the gradients on the device."""
    lock = lock or threading.RLock()
    parts = {"config": MemAscendConfig()} | parts
    return SimpleNamespace(lock=lock, on_device=GradientsOnDevice(Device(), Guard(lock)), **parts)
