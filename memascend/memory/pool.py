"""The pool: slots for tensors of any size, cut from segments of host memory.

With a budget, all segments together never exceed it. Memory is taken as slots are needed, in
segments that double; at the budget, idle segments are freed to make room for a larger one. Without
a budget the pool grows on request, by one slot at a time, so that its slots have the sizes of the
model's own shapes; a free slot is reused for shapes of nearly its size.

Knows host memory and byte counts; not the tensors, the store, or when to wait. One thread at a time
may call, which `guard` checks; any thread may drop leases and holds.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memascend.base.units import MIB, NBYTES_MAX, PAGE_BYTES, page_down, page_up
from memascend.memory.guard import Guard, guarded

if TYPE_CHECKING:
    import torch

    from memascend.base.interfaces import HostMemory

#: The largest slot is the budget divided by this, so that at least so many slots fit.
SLOT_PARTS = 4
#: First segment of a budget; each later one is as large as all before it, up to the largest slot.
SEGMENT_BYTES_MIN = 4 * MIB
#: Without a budget: the part of a slot that may stay unused when another shape reuses it.
WASTE_MAX = 1 / 16


class Pool:
    """Slots of any size over any host memory. See the module's docstring."""

    def __init__(
        self,
        *,
        memory: HostMemory,
        component: str,
        budget_bytes: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Begin without memory.

        Args:
            memory: Source of the segments.
            component: Name in the ledger.
            budget_bytes: Maximum of all segments together; None lets the pool grow.
            guard: Checks the callers; None: they are one thread.

        Raises:
            ValueError: The budget has no room for SLOT_PARTS pages.
        """
        self.is_bounded = budget_bytes is not None
        self.budget_bytes = NBYTES_MAX if budget_bytes is None else budget_bytes
        self.slot_bytes_max = page_down(self.budget_bytes // SLOT_PARTS)
        if self.slot_bytes_max <= 0:
            raise ValueError(
                f"a budget of {budget_bytes} bytes has no room for {SLOT_PARTS} pages of "
                f"{PAGE_BYTES} bytes. fix: a larger parameter budget"
            )
        self.guard = guard
        self._memory = memory
        self._component = component
        self._segments: list[Segment] = []
        self._returned: deque[tuple[Segment, int, int]] = deque()

    @guarded
    def resize(self, budget_bytes: int, *, slot_bytes_max: int) -> None:
        """Change the budget, and take all of it now, in one piece.

        Args:
            budget_bytes: New budget, in whole pages.
            slot_bytes_max: New maximum size of a slot.

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
            self._take_memory(budget_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory taken so far."""
        return sum(segment.memory.nbytes for segment in self._segments)

    @property
    @guarded
    def free_bytes(self) -> int:
        """Bytes of that memory that no slot uses."""
        self._collect()
        return sum(end - begin for segment in self._segments for begin, end in segment.free)

    def slot_bytes(self, nbytes: int) -> int:
        """Return the slot size for a tensor of `nbytes`; 0 if it is too large for a slot."""
        return page_up(nbytes) if nbytes <= self.slot_bytes_max else 0

    @guarded
    def acquire(self, nbytes: int) -> Lease | None:
        """Lease a slot for `nbytes`; None if none is free and no memory may be taken.

        Raises:
            HostMemoryError: The budget allows more memory, but the system does not.
        """
        wanted = self.slot_bytes(nbytes)
        if wanted <= 0:
            return None
        self._collect()
        lease = self._cut(wanted)
        if lease is None and self.is_bounded and self._add_segment(wanted):
            lease = self._cut(wanted)
        return lease

    @guarded
    def grow(self, nbytes: int) -> bool:
        """Take memory for one more slot of `nbytes`; False with a budget, where it does nothing.

        Raises:
            HostMemoryError: The system does not have the memory.
        """
        if not self.is_bounded:
            self._take_memory(page_up(nbytes))
        return not self.is_bounded

    def suits(self, slot_bytes: int, nbytes: int) -> bool:
        """Return whether freeing a slot of `slot_bytes` may make room for `nbytes`.

        With a budget every slot may, since free runs merge. Without one a slot keeps its size.
        """
        if self.is_bounded:
            return True
        return 0 <= slot_bytes - page_up(nbytes) <= max(PAGE_BYTES, WASTE_MAX * slot_bytes)

    def _collect(self) -> None:
        # A slot may be released at any moment, by any thread: it is queued then, and freed here.
        while self._returned:
            segment, begin, end = self._returned.popleft()
            segment.put(begin, end)

    def _cut(self, nbytes: int) -> Lease | None:
        runs = [
            (end - begin, number, index)
            for number, segment in enumerate(self._segments)
            for index, (begin, end) in enumerate(segment.free)
            if end - begin >= nbytes and self.suits(end - begin, nbytes)
        ]
        if not runs:
            return None
        run_bytes, number, index = min(runs)
        segment = self._segments[number]
        slot_bytes = nbytes if self.is_bounded else run_bytes
        # Small slots go to the end of a run, so that they do not split the room of large ones.
        begin = segment.take(index, slot_bytes, from_end=nbytes < self.slot_bytes_max // 8)
        end = begin + slot_bytes
        use = _Use()
        returning = weakref.finalize(use, self._returned.append, (segment, begin, end))
        returning.atexit = False
        return Lease(segment.memory[begin:end], use)

    def _add_segment(self, nbytes: int) -> bool:
        """Take memory for a slot of `nbytes`; False if the budget has no room for it."""
        room_bytes = self._make_way(nbytes)
        if room_bytes < nbytes:
            return False
        doubled = min(max(self.held_bytes, SEGMENT_BYTES_MIN), self.slot_bytes_max)
        self._take_memory(min(max(nbytes, doubled), page_down(room_bytes)))
        return True

    def _take_memory(self, nbytes: int) -> None:
        import torch

        memory = self._memory.tensor(nbytes, torch.uint8, component=self._component)
        self._segments.append(Segment(memory, [(0, nbytes)]))

    def _make_way(self, nbytes: int) -> int:
        """Free idle segments, smallest first, if that makes room for `nbytes`; return the room."""
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


class Lease:
    """The exclusive right to a slot, which is free once the lease and every hold are gone."""

    def __init__(self, slot: torch.Tensor, use: _Use) -> None:
        self.slot = slot
        self.slot_bytes = int(slot.nbytes)
        self._use: _Use | None = use

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `numel` elements of the slot; the tensor keeps the memory mapped."""
        return self.slot[: numel * dtype.itemsize].view(dtype)

    def hold(self) -> object:
        """Return an object that keeps the slot from being reused while it lives.

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
        """Give up the slot; a second call has no effect."""
        self._use = None
        # A released lease that is still referenced must not keep a segment's memory.
        self.slot = self.slot[:0].clone()


class _Use:
    """Shared by a lease and every transfer on its slot; the slot is free when the last is gone."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class Segment:
    """One piece of memory and its free runs (begin, end), sorted."""

    memory: torch.Tensor
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """True if no slot uses the segment."""
        return self.free == [(0, self.memory.nbytes)]

    def put(self, begin: int, end: int) -> None:
        """Free a run and merge it with its neighbours."""
        runs: list[tuple[int, int]] = []
        for run in sorted([*self.free, (begin, end)]):
            if runs and runs[-1][1] == run[0]:
                runs[-1] = (runs[-1][0], run[1])
            else:
                runs.append(run)
        self.free = runs

    def take(self, index: int, nbytes: int, *, from_end: bool) -> int:
        """Take bytes from one free run; return where they begin."""
        begin, end = self.free[index]
        taken = end - nbytes if from_end else begin
        rest = (begin, taken) if from_end else (begin + nbytes, end)
        self.free[index : index + 1] = [rest] if rest[0] < rest[1] else []
        return taken
