"""A gradient stream over a memory engine, and the flat buffers that it must equal."""

from __future__ import annotations

import torch

from memascend.kernels.overflow import sum_of_squares
from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import MemoryFaults
from memascend.streaming.gradients.stream import GradientStream
from memascend.transfer.staging import StagingSlots
from tests.support.streaming_hosts import HostTensors, memory_store, staging_slots

GROUP = "0_9"
#: Little: a property that fails leaves many stores behind, each with memory of this size.
CAPACITY_BYTES = 4 << 20


def open_gradient_stream(
    *, slot_count: int = 3, granted_bytes: int = 0, faults: MemoryFaults | None = None
) -> tuple[GradientStream, ResidentStore, StagingSlots]:
    """A gradient stream, its store that may keep so many gradients in memory, and its slots."""
    below = memory_store(faults or MemoryFaults(capacity_bytes=CAPACITY_BYTES))
    store = ResidentStore(below, stream_of=lambda key: key.partition(".")[0])
    store.grant({"gradient": granted_bytes}, memory=HostTensors(), component="resident cache")
    slots = staging_slots(store, slot_count=slot_count)
    gradient_stream = GradientStream(
        store=store,
        slots=slots,
        sum_of_squares=sum_of_squares,
        give_memory_to=store.give_memory_to,
        memory_of=store.memory_of,
    )
    return gradient_stream, store, slots


class FlatBuffers:
    """DeepSpeed's CPU offload: sums that micro-steps copy to or add to, and what a step sees."""

    def __init__(self, sizes: list[int], dtype: torch.dtype) -> None:
        self.sizes = sizes
        self.offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        self.sums = torch.zeros(sum(sizes), dtype=dtype)
        self.seen = torch.zeros(sum(sizes))

    def put(self, index: int, gradient: torch.Tensor, *, accumulate: bool, final: bool) -> None:
        part = self.sums.narrow(0, self.offsets[index], gradient.numel())
        part.add_(gradient) if accumulate else part.copy_(gradient)
        if final:
            self.finish(index, gradient.numel())

    def finish(self, index: int, numel: int) -> None:
        offset = self.offsets[index]
        self.seen.narrow(0, offset, numel).copy_(self.sums.narrow(0, offset, numel))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))
