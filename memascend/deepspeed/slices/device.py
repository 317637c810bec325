"""The account of device memory by which the number of slices is chosen, from the accelerator."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from memascend.base.units import MIB

#: Left free, for fragments of the allocator and for parameters that DeepSpeed gathers ahead once it
#: knows the order of their use: this share of the device's memory, and at least so many bytes.
MARGIN_DIVISOR, MARGIN_BYTES_MIN = 16, 512 * MIB


class AcceleratorMemory:
    """Implements `memascend.slices.auto.DeviceMemory` for the current device."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def held_bytes(self) -> int:
        """Return the memory of all tensors."""
        return int(self._accelerator.memory_allocated())

    def begin_peak(self) -> None:
        """Begin to note the most that tensors take; resets the statistics that scripts read."""
        self._accelerator.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most that tensors have taken since then."""
        return int(self._accelerator.max_memory_allocated())

    def room_bytes(self) -> int:
        """Return the most that tensors may take: the allocator's memory and the free one."""
        total = int(self._accelerator.total_memory())
        reserved = int(self._accelerator.memory_reserved())
        room = min(total, reserved + int(self._accelerator.available_memory()))
        room = min(room, int(total * _fraction(self._accelerator.device_name())))
        return room - max(total // MARGIN_DIVISOR, MARGIN_BYTES_MIN)


def device_memory() -> AcceleratorMemory | None:
    """Return the account of the current device; None on an accelerator that has none."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():  # the CPU: its memory is host memory
        return None
    memory = AcceleratorMemory(accelerator)
    return memory if accelerator.memory_allocated() and accelerator.total_memory() else None


def _fraction(device_name: str) -> float:
    """Return the share of a device's memory that the script lets torch take."""
    find = getattr(torch.get_device_module(device_name), "get_per_process_memory_fraction", None)
    return 1.0 if find is None else float(find())
