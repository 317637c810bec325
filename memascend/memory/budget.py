"""Slots of any size that together never take more than a fixed number of bytes of host memory.

Knows host memory and byte counts; never tensors' meaning, stores or when it is wise to wait. With
these the memory of the parameter path is a number in the plan; the size classes of `pool.py` keep
every slot they ever had instead, so that their memory follows the model.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend.errors import PoolExhaustedError

if TYPE_CHECKING:
    import torch

    from memascend.base.interfaces import HostMemory

PAGE_BYTES = 4096
#: The largest slot is this part of the budget, so that as many fit at least.
SEGMENT_COUNT = 4
#: First segment; each next one is as large as all before it.
SEGMENT_BYTES_MIN = 4 << 20


class BudgetSlots:
    """Slots of any size that together never take more than a fixed number of bytes.

    Slots are cut from a few segments, best fit, in whole pages. Memory is taken as slots are
    needed, in segments that double, up to the budget; then segments that nothing uses give way to
    one that is large enough. One thread at a time may call; leases may be dropped by any.
    """

    def __init__(
        self, *, memory: HostMemory, budget_bytes: int, component: str = "parameter pool"
    ) -> None:
        """Takes no memory yet.

        Args:
            memory: Where segments come from.
            budget_bytes: Most bytes of all segments together.
            component: Name in the ledger.

        Raises:
            ValueError: The budget has no room for SEGMENT_COUNT pages.
        """
        self.slot_bytes_max = budget_bytes // SEGMENT_COUNT // PAGE_BYTES * PAGE_BYTES
        if self.slot_bytes_max <= 0:
            raise ValueError(
                f"a budget of {budget_bytes} bytes has no room for {SEGMENT_COUNT} pages of "
                f"{PAGE_BYTES} bytes. fix: a larger parameter budget"
            )
        self.budget_bytes = budget_bytes
        self._memory = memory
        self._component = component
        self._segments: list[Segment] = []
        self._returned: deque[tuple[Segment, int, int]] = deque()

    def resize(self, budget_bytes: int, *, slot_bytes_max: int) -> None:
        """Takes another budget, all of it now and in one piece.

        Args:
            budget_bytes: Whole pages.
            slot_bytes_max: Largest slot from now on.

        Raises:
            ValueError: A slot is leased.
            HostMemoryError: There is not enough memory.
        """
        self._collect()
        if not all(segment.idle for segment in self._segments):
            raise ValueError(
                "cannot resize the parameter slots: some are leased. likely cause: a parameter is "
                "gathered while the optimizer is made. fix: leave GatheredParameters first"
            )
        self._segments.clear()
        self.budget_bytes, self.slot_bytes_max = budget_bytes, slot_bytes_max
        if budget_bytes:
            memory = self._memory.tensor(budget_bytes, _uint8(), component=self._component)
            self._segments.append(Segment(memory, [(0, budget_bytes)]))

    @property
    def held_bytes(self) -> int:
        """Memory taken so far."""
        return sum(segment.memory.nbytes for segment in self._segments)

    @property
    def free_bytes(self) -> int:
        """Of the memory taken, what no slot uses."""
        self._collect()
        return sum(end - begin for segment in self._segments for begin, end in segment.free)

    def acquire(self, nbytes: int) -> SegmentLease | None:
        """A lease on a slot for `nbytes`, or None when the budget is spent.

        Raises:
            HostMemoryError: The budget allows more memory, but the system does not.
        """
        wanted = round_up(nbytes)
        if not 0 < wanted <= self.slot_bytes_max:
            return None
        self._collect()
        lease = self._cut(wanted)
        if lease is None and self._add_segment(wanted):
            lease = self._cut(wanted)
        return lease

    def grow(self, nbytes: int) -> None:
        """Refuses: what has no room within the budget has to wait or to travel in chunks.

        Raises:
            PoolExhaustedError: Always; names the budget.
        """
        raise PoolExhaustedError(
            f"no slot for {nbytes} bytes: {self.held_bytes} of {self.budget_bytes} bytes of the "
            f"parameter budget are held, the largest slot has {self.slot_bytes_max} bytes. likely "
            "cause: more tensors in use at once than planned. fix: a larger parameter budget"
        )

    def view(self, lease: SegmentLease, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of the slot; the tensor keeps the memory mapped."""
        return lease.slot[: numel * dtype.itemsize].view(dtype)

    def _collect(self) -> None:
        # A slot may come back at any moment, so it is only noted then, and freed here.
        while self._returned:
            segment, begin, end = self._returned.popleft()
            segment.put(begin, end)

    def _cut(self, nbytes: int) -> SegmentLease | None:
        runs = [
            (end - begin, number, index)
            for number, segment in enumerate(self._segments)
            for index, (begin, end) in enumerate(segment.free)
            if end - begin >= nbytes
        ]
        if not runs:
            return None
        _, number, index = min(runs)
        segment = self._segments[number]
        # Small slots gather at the ends, so that they do not cut the room of large ones in two.
        begin = segment.take(index, nbytes, from_end=nbytes < self.slot_bytes_max // 8)
        use = _Use()
        returning = weakref.finalize(use, self._returned.append, (segment, begin, begin + nbytes))
        returning.atexit = False
        return SegmentLease(segment.memory[begin : begin + nbytes], use)

    def _add_segment(self, nbytes: int) -> bool:
        """Takes memory for a slot of `nbytes`; False when the budget and idle segments forbid."""
        room_bytes = self._make_way(nbytes)
        if room_bytes < nbytes:
            return False
        doubled = min(max(self.held_bytes, SEGMENT_BYTES_MIN), self.slot_bytes_max)
        segment_bytes = min(max(nbytes, doubled), room_bytes // PAGE_BYTES * PAGE_BYTES)
        memory = self._memory.tensor(segment_bytes, _uint8(), component=self._component)
        self._segments.append(Segment(memory, [(0, segment_bytes)]))
        return True

    def _make_way(self, nbytes: int) -> int:
        """Lets idle segments go, smallest first, where that gives room for `nbytes`."""
        room_bytes = self.budget_bytes - self.held_bytes
        idle_bytes = sum(one.memory.nbytes for one in self._segments if one.idle)
        if room_bytes + idle_bytes < nbytes:
            return room_bytes
        while room_bytes < nbytes:
            nbytes_of = {i: one.memory.nbytes for i, one in enumerate(self._segments) if one.idle}
            smallest = min(nbytes_of, key=lambda index: nbytes_of[index])
            room_bytes += nbytes_of[smallest]
            del self._segments[smallest]
        return room_bytes


class SegmentLease:
    """The exclusive right to a slot of BudgetSlots."""

    def __init__(self, slot: torch.Tensor, use: _Use) -> None:
        self.slot = slot
        self.slot_bytes = int(slot.nbytes)
        self._use: _Use | None = use

    def hold(self) -> object:
        """Something that keeps the slot from being reused while it lives.

        Raises:
            ValueError: The lease was released.
        """
        if self._use is None:
            raise ValueError(
                "cannot hold a released lease. likely cause: I/O started after release(); take the "
                "hold before"
            )
        return self._use

    def release(self) -> None:
        """Gives the slot up; again is harmless."""
        self._use = None
        self.slot = self.slot[
            :0
        ].clone()  # a lease that lies about must not keep a segment's memory


@dataclass(eq=False, slots=True)
class Segment:
    """One piece of memory and the runs of it that are free, by their begin."""

    memory: torch.Tensor
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether nothing uses it."""
        return self.free == [(0, self.memory.nbytes)]

    def put(self, begin: int, end: int) -> None:
        """Frees a run and merges it with its neighbours."""
        runs: list[tuple[int, int]] = []
        for run in sorted([*self.free, (begin, end)]):
            if runs and runs[-1][1] == run[0]:
                runs[-1] = (runs[-1][0], run[1])
            else:
                runs.append(run)
        self.free = runs

    def take(self, index: int, nbytes: int, *, from_end: bool) -> int:
        """Takes bytes from one free run; gives where they begin."""
        begin, end = self.free[index]
        taken = end - nbytes if from_end else begin
        rest = (begin, taken) if from_end else (begin + nbytes, end)
        self.free[index : index + 1] = [rest] if rest[0] < rest[1] else []
        return taken


class _Use:
    """Held by a lease and by every transfer on its slot; the slot is free when the last is gone."""

    __slots__ = ("__weakref__",)


def round_up(nbytes: int) -> int:
    """The bytes that a slot for `nbytes` takes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8
