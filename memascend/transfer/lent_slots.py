"""Slots of one size, lent as tensors: which are free, and which Ctrl-C left in no list.

Small tensors share a slot: if one fits behind the parts already lent of the last slot, it is cut
from that slot. The slot is free again when its last part is.

Ctrl-C may come between any two lines. Code that moves a slot therefore removes it from one list
before it adds it to another: a slot is never in two lists, but may be in none. Such a slot can be
freed when all tensors lent from it are garbage (the store keeps them while the drive uses them) and
the device is idle (copies without an event may be queued on any of its streams).

Knows torch; never the store. One thread at a time may call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from memascend.base.interfaces import HostMemory
from memascend.base.units import page_down

#: With so many every transfer makes progress: one slot fills while another empties.
SLOT_COUNT_MIN = 2
#: Most tensors that share a slot: each takes whole parts, which bounds the transfers in flight.
PART_COUNT = 16


@dataclass(slots=True, eq=False)
class Slot:
    """A slot, and the tensors cut from it since it was free."""

    memory: torch.Tensor
    lent: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    lent_bytes: int = 0  # from the slot's start
    held_count: int = 0  # tensors lent and not freed yet

    def contains(self, lent: torch.Tensor) -> bool:
        """Return whether a tensor was cut from this slot."""
        return 0 <= lent.data_ptr() - self.memory.data_ptr() < self.memory.nbytes

    def is_gone(self) -> bool:
        """Return whether all tensors cut from this slot are garbage."""
        return all(tensor() is None for tensor in self.lent)


class LentSlots:
    """The memory of slots, and the free ones."""

    def __init__(
        self,
        *,
        memory: HostMemory,
        component: str,
        wait_idle: Callable[[], object] | None = None,
    ) -> None:
        """Start without slots; `exchange` takes them.

        Args:
            memory: Page-locked host memory.
            component: Name in the ledger.
            wait_idle: Waits until the device is idle; None when it is the CPU.
        """
        self._memory, self._component = memory, component
        self._wait_idle = wait_idle
        self._slots: list[Slot] = []
        self._free: deque[Slot] = deque()
        self._last: Slot | None = None  # lent last, and not free
        self._part_bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free_count(self) -> int:
        """Number of slots of which no part is lent."""
        return len(self._free)

    def exchange(self, *, slot_bytes: int, slot_count: int) -> None:
        """Free all slots, and allocate new ones.

        Raises:
            HostMemoryError: There is not enough memory.
        """
        self._last = None
        self._free.clear()
        self._slots.clear()
        # Parts are whole pages, for direct I/O; slots too small for that are not shared.
        self._part_bytes = page_down(slot_bytes // PART_COUNT) or slot_bytes
        for _ in range(slot_count):
            memory = self._memory.tensor(slot_bytes, torch.uint8, component=self._component)
            self._slots.append(Slot(memory))
            self._free.append(self._slots[-1])

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` can be lent."""
        return bool(self._free) or self._fits_behind(self._last, nbytes)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Cut a tensor from the slot that was lent last, else from the one free longest."""
        nbytes = numel * dtype.itemsize
        slot = self._last
        if slot is None or not self._fits_behind(slot, nbytes):
            slot = self._free.popleft()
            slot.lent.clear()
            slot.lent_bytes = slot.held_count = 0
            self._last = slot
        lent = slot.memory[slot.lent_bytes :][:nbytes].view(dtype)
        slot.lent_bytes += -(-nbytes // self._part_bytes) * self._part_bytes
        slot.held_count += 1
        slot.lent.append(weakref.ref(lent))
        return lent

    def slot_of(self, lent: torch.Tensor) -> Slot:
        """Return the slot that a lent tensor was cut from."""
        return next(slot for slot in self._slots if slot.contains(lent))

    def free(self, slot: Slot) -> None:
        """Free one of a slot's tensors; after the last one the slot can be lent again."""
        slot.held_count -= 1
        if slot.held_count == 0:
            self._let_go(slot)

    def find_lost(self, listed: Iterable[Slot]) -> bool:
        """Free lost slots: in no list, and with no live tensors. Return whether there were any.

        Args:
            listed: The slots in the lists of the caller.
        """
        known = {*listed, *self._free}
        lost = [slot for slot in self._slots if slot not in known and slot.is_gone()]
        if lost and self._wait_idle is not None:
            self._wait_idle()
        for slot in lost:
            self._let_go(slot)
        return bool(lost)

    def _fits_behind(self, slot: Slot | None, nbytes: int) -> bool:
        return slot is not None and slot.lent_bytes + nbytes <= slot.memory.nbytes

    def _let_go(self, slot: Slot) -> None:
        if slot is self._last:
            self._last = None  # first, so that a slot is never both the last and free
        self._free.append(slot)


class GivenBackOnError:
    """Context manager that gives a taken slot back when an exception leaves the block.

    Not after Ctrl-C: a transfer may have started whose ticket was lost.
    """

    def __init__(self, give_back: Callable[[torch.Tensor], None], staged: torch.Tensor) -> None:
        self._give_back = give_back
        self._staged = staged

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the slot back if an Exception left the block."""
        if kind is not None and issubclass(kind, Exception):
            self._give_back(self._staged)
