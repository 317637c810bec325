"""An activation stream over a store in memory, and what it does in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from memascend.base.interfaces import Device, Event
from memascend.nvme.store import MemoryFaults
from memascend.streaming.activations.stream import ActivationStream
from memascend.transfer.staging import StagingSlots
from tests.support.streaming_hosts import HostTensors, memory_store

#: Smaller than what is saved, so that it passes in several chunks.
SLOT_BYTES = 4096
WAIT_S = 60.0


class InOrder:
    """An event of a device that does what it was told only when somebody waits for it."""

    made = 0
    passed = 0

    def record(self) -> None:
        InOrder.made += 1
        self.number = InOrder.made

    def query(self) -> bool:
        return self.number <= InOrder.passed

    def synchronize(self) -> None:
        InOrder.passed = max(InOrder.passed, self.number)

    def wait(self) -> None:
        """Nothing is issued: copies are made at once."""


def activation_stream(
    faults: MemoryFaults | None = None,
    *,
    device_bytes: int = 0,
    new_event: Callable[[], Event] | None = None,
    use_device: Callable[[], object] = int,
    **options: Any,
) -> ActivationStream:
    """Make one over a store in memory with these options."""
    slots = StagingSlots(
        store=memory_store(faults, **options),
        memory=HostTensors(),
        slot_bytes=SLOT_BYTES,
        slot_count=3,
        component="activation slots",
        new_event=new_event,
    )
    device = Device(new_event=new_event, use_here=use_device)
    return ActivationStream(slots=slots, device_bytes=device_bytes, device=device)


def keys(stream: ActivationStream) -> list[str]:
    """What is on the drive once nothing is under way."""
    stream.drain()
    return stream.slots.store.keys()  # type: ignore[attr-defined, no-any-return]


def numbers(seed: int, count: int = 5000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.001)
