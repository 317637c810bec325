"""Slots of one size, lent as tensors: which are free, and which Ctrl-C has left to nobody.

Small tensors share: as long as one fits behind what the last slot is lent for, it is cut from that
slot, which is free again with the last of its parts.

Ctrl-C may come between any two lines, so whoever passes slots on takes one out of one list before
it goes into another: it is never in two, but it may be in none. Such a slot is free again when the
tensors that were lent of it are gone, which the store keeps for as long as the drive uses them, and
when the device is idle: copies that no event marks may be on any of its streams.

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

#: With so many every transfer goes on: one fills while another empties.
SLOT_COUNT_MIN = 2
#: Most tensors that share a slot: each takes whole parts, so that the transfers in flight are few.
PART_COUNT = 16


@dataclass(slots=True, eq=False)
class Slot:
    """A slot, and what has been cut from it since it was free."""

    memory: torch.Tensor
    lent: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    lent_bytes: int = 0  # from its beginning on
    held_count: int = 0  # lent, and not over yet

    def contains(self, lent: torch.Tensor) -> bool:
        """Return whether a tensor was cut from it."""
        return 0 <= lent.data_ptr() - self.memory.data_ptr() < self.memory.nbytes

    def is_gone(self) -> bool:
        """Return whether nobody has any tensor of it."""
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
        """Begin with none.

        Args:
            memory: Page-locked host memory.
            component: Name in the ledger.
            wait_idle: Waits until the device has nothing to do; None when it is the CPU.
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
        """How many are free as a whole."""
        return len(self._free)

    def exchange(self, *, slot_bytes: int, slot_count: int) -> None:
        """Let all slots go, and take others.

        Raises:
            HostMemoryError: There is not enough memory.
        """
        self._last = None
        self._free.clear()
        self._slots.clear()
        # Pages, as memory that the drive uses at once: or else slots are not shared.
        self._part_bytes = page_down(slot_bytes // PART_COUNT) or slot_bytes
        for _ in range(slot_count):
            memory = self._memory.tensor(slot_bytes, torch.uint8, component=self._component)
            self._slots.append(Slot(memory))
            self._free.append(self._slots[-1])

    def has_room(self, nbytes: int) -> bool:
        """Return whether so many bytes can be lent."""
        return bool(self._free) or self._fits_behind(self._last, nbytes)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Cut a tensor from the slot that was lent last, else from the one free for longest."""
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
        """Note that one of a slot's tensors is over; with the last it can be lent again."""
        slot.held_count -= 1
        if slot.held_count == 0:
            self._let_go(slot)

    def find_lost(self, listed: Iterable[Slot]) -> bool:
        """Free the slots that nobody has any more; return whether there were any.

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
            self._last = None  # first: never both
        self._free.append(slot)


class GivenBackOnError:
    """A block that gives a taken slot back when an error leaves it.

    Not behind Ctrl-C: a transfer may have begun of which nobody has the ticket.
    """

    def __init__(self, give_back: Callable[[torch.Tensor], None], staged: torch.Tensor) -> None:
        self._give_back = give_back
        self._staged = staged

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the slot back if an error left the block."""
        if kind is not None and issubclass(kind, Exception):
            self._give_back(self._staged)
