"""The pool: leases of slots for tensors of any size, cut from segments of host memory.

With a budget, all segments together never exceed it. Memory is taken as slots are needed, in
segments that double; at the budget, idle segments are freed to make room for a larger one. Without
a budget the pool grows on request, by one slot at a time, so that its slots have the sizes of the
model's own shapes; a free slot is reused for shapes of nearly its size.

Knows host memory and byte counts; not the tensors, the store, or when to wait. One thread at a time
may call, which `guard` checks; any thread may drop leases and holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._core import FreeSpace, TakenRun
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
        """Begin without memory; `component` is the name of the segments in the ledger.

        Without a budget the pool grows; with one of 0 bytes there are no slots before `resize`.

        Raises:
            ValueError: The budget has no room for SLOT_PARTS pages.
        """
        self.is_bounded = budget_bytes is not None
        self.budget_bytes = NBYTES_MAX if budget_bytes is None else budget_bytes
        self.slot_bytes_max = page_down(self.budget_bytes // SLOT_PARTS)
        if budget_bytes != 0 and self.slot_bytes_max <= 0:
            raise ValueError(
                f"a budget of {budget_bytes} bytes has no room for {SLOT_PARTS} pages of "
                f"{PAGE_BYTES} bytes. fix: a larger parameter budget"
            )
        self.guard = guard
        self._memory = memory
        self._component = component
        self._segments: list[Segment] = []

    @guarded
    def resize(
        self, budget_bytes: int, *, slot_bytes_max: int, segment_bytes: int | None = None
    ) -> None:
        """Change the budget, in whole pages, and take all of it now.

        Segments divide the budget; None: there is one. If they are as large as the largest slot,
        large slots never wait for several small ones.

        Raises:
            ValueError: A slot is leased.
            HostMemoryError: There is not enough memory.
        """
        if not all(segment.idle for segment in self._segments):
            raise ValueError(
                "cannot resize the parameter slots: some are leased. likely cause: a parameter is "
                "gathered while the optimizer is made. fix: leave GatheredParameters first"
            )
        self._segments.clear()
        self.budget_bytes, self.slot_bytes_max = budget_bytes, slot_bytes_max
        for _ in range(budget_bytes // (segment_bytes or budget_bytes) if budget_bytes else 0):
            self._take_memory(segment_bytes or budget_bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory taken so far."""
        return sum(segment.memory.nbytes for segment in self._segments)

    @property
    @guarded
    def free_bytes(self) -> int:
        """Bytes of that memory that no slot uses."""
        return sum(segment.space.free_bytes for segment in self._segments)

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

    def _cut(self, nbytes: int) -> Lease | None:
        found = [(segment, segment.space.best(nbytes)) for segment in self._segments]
        runs = [(run[1], run[0], segment) for segment, run in found if run is not None]
        if not runs:
            return None
        # The smallest run of all; if it is too large to be used for less, all others are.
        run_bytes, begin, segment = min(runs, key=lambda run: run[0])
        if not self.suits(run_bytes, nbytes):
            return None
        slot_bytes = nbytes if self.is_bounded else run_bytes
        # Small slots go to the end of a run, so that they do not split the room of large ones.
        if nbytes < self.slot_bytes_max // 8:
            begin += run_bytes - slot_bytes
        # Equal segments are used in turn.
        self._segments = [*(one for one in self._segments if one is not segment), segment]
        run = segment.space.take(begin=begin, nbytes=slot_bytes)
        return Lease(segment.memory[begin : begin + slot_bytes], run)

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
        self._segments.append(Segment(memory))

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
    """The exclusive right to a slot, which is free once the lease and every hold are gone.

    It ends at `release`, or with its last reference: a lease that Ctrl-C left to no one ends too.
    """

    def __init__(self, slot: torch.Tensor, run: TakenRun) -> None:
        self.slot = slot
        self.slot_bytes = int(slot.nbytes)
        self._run: TakenRun | None = run  # given back with its last reference

    def view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `numel` elements of the slot; the tensor keeps the memory mapped."""
        return self.slot[: numel * dtype.itemsize].view(dtype)

    def hold(self) -> object:
        """Return an object that keeps the slot from being reused; a ValueError after `release`."""
        if self._run is None:
            raise ValueError(
                "cannot hold a released lease. likely cause: I/O started after release(); take the "
                "hold before"
            )
        return self._run

    def release(self) -> None:
        """Give up the slot; a second call has no effect."""
        self._run = None
        # A released lease that is still referenced must not keep a segment's memory.
        self.slot = self.slot[:0].clone()


class Segment:
    """One piece of memory and its free runs."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.space = FreeSpace(memory.nbytes)

    @property
    def idle(self) -> bool:
        """True if no slot uses the segment."""
        return self.space.free_bytes == self.memory.nbytes
