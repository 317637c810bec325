"""Slots of one size, lent as tensors: which are free, and which Ctrl-C has left to nobody.

Ctrl-C may come between any two lines, so whoever passes slots on takes one out of one list before
it goes into another: it is never in two, but it may be in none. Such a slot is free again when the
tensor that was lent of it is gone, which the store keeps for as long as the drive uses it, and when
the device is idle: copies that no event marks may be on any of its streams.

Knows torch; never the store. One thread at a time may call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch

from memascend.base.components import STAGING_SLOTS
from memascend.base.interfaces import HostMemory


class LentSlots:
    """The memory of slots, and the free ones."""

    def __init__(
        self, *, memory: HostMemory, wait_idle: Callable[[], object] | None = None
    ) -> None:
        """Begin with none.

        Args:
            memory: Page-locked host memory.
            wait_idle: Waits until the device has nothing to do; None when it is the CPU.
        """
        self._memory = memory
        self._wait_idle = wait_idle
        self._free: deque[torch.Tensor] = deque()
        self._slots: dict[int, torch.Tensor] = {}  # by address
        self._lent: dict[int, weakref.ref[torch.Tensor]] = {}  # last, by address

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free_count(self) -> int:
        """How many can be lent."""
        return len(self._free)

    def exchange(self, *, slot_bytes: int, slot_count: int) -> None:
        """Let all slots go, and take others.

        Raises:
            HostMemoryError: There is not enough memory.
        """
        self._free.clear()
        self._slots.clear()
        self._lent.clear()
        for _ in range(slot_count):
            slot = self._memory.tensor(slot_bytes, torch.uint8, component=STAGING_SLOTS)
            self._free.append(slot)
            self._slots[slot.data_ptr()] = slot

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the beginning of the slot that has been free for longest."""
        slot = self._free.popleft()
        lent = slot[: numel * dtype.itemsize].view(dtype)
        self._lent[slot.data_ptr()] = weakref.ref(lent)
        return lent

    def slot_of(self, lent: torch.Tensor) -> torch.Tensor:
        """Return the slot that a lent tensor is the beginning of."""
        return self._slots[lent.data_ptr()]

    def free(self, slot: torch.Tensor) -> None:
        """Let a slot be lent again."""
        self._free.append(slot)

    def find_lost(self, listed: Iterable[torch.Tensor]) -> bool:
        """Free the slots that nobody has any more; return whether there were any.

        Args:
            listed: The slots in the lists of the caller.
        """
        known = {slot.data_ptr() for slot in [*listed, *self._free]}
        lost = [slot for at, slot in self._slots.items() if at not in known and self._is_gone(at)]
        if lost and self._wait_idle is not None:
            self._wait_idle()
        self._free.extend(lost)
        return bool(lost)

    def _is_gone(self, address: int) -> bool:
        lent = self._lent.get(address)
        return lent is None or lent() is None


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
