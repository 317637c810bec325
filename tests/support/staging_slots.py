"""Staging slots of a page each, over fakes."""

from __future__ import annotations

import torch

from memascend.memory.guard import Guard
from memascend.transfer.staging import StagingSlots
from tests.support.streaming_fakes import FakeMemory, LateDevice

SLOT_BYTES, SLOT_COUNT = 4096, 3


def make_staging(
    store: object,
    device: LateDevice | None = None,
    *,
    slot_count: int = SLOT_COUNT,
    guard: Guard | None = None,
) -> StagingSlots:
    return StagingSlots(
        store=store,  # type: ignore[arg-type]
        memory=FakeMemory(),
        slot_bytes=SLOT_BYTES,
        slot_count=slot_count,
        new_event=None if device is None else device.new_event,
        wait_idle=None if device is None else device.synchronize,
        guard=guard,
    )


def counted(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values that differ from their neighbours."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, (numel,), generator=generator).to(dtype)
