"""A store in memory, staging slots and host tensors, for what streams through them."""

from __future__ import annotations

from typing import Any

import torch

from memascend.base.interfaces import HostMemory
from memascend.base.units import PAGE_BYTES
from memascend.nvme.store import MemoryFaults, TensorStore
from memascend.transfer.staging import StagingSlots
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory

SLOT_BYTES = 4096


class HostTensors(HostMemory):
    """Ordinary torch memory, page-aligned, and how much of it was asked for by component."""

    def __init__(self) -> None:
        self.nbytes: dict[str, int] = {}

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        self.nbytes[component] = self.nbytes.get(component, 0) + nbytes
        whole = torch.full((nbytes + PAGE_BYTES,), 0 if zero else 0xA5, dtype=torch.uint8)
        begin = -whole.data_ptr() % PAGE_BYTES
        return whole[begin : begin + nbytes]

    def contains(self, tensor: torch.Tensor) -> bool:
        return True


def memory_store(
    faults: MemoryFaults | None = None, *, watchdog_seconds: float = 60.0, **options: Any
) -> TensorStore:
    return TensorStore(
        volumes=["(memory)"],
        bounce=PageMemory(BOUNCE_BYTES).tensor,
        engine="memory",
        watchdog_seconds=watchdog_seconds,
        faults=faults or MemoryFaults(),
        **options,
    )


def staging_slots(
    store: TensorStore, *, slot_count: int = 3, slot_bytes: int = SLOT_BYTES
) -> StagingSlots:
    return StagingSlots(
        store=store, memory=HostTensors(), slot_bytes=slot_bytes, slot_count=slot_count
    )
