"""Tensors cut from leased slots of one size.

Small tensors share a slot: if one fits behind those already cut from the slot that was leased last,
it is cut from that slot. The slot is free again when all of its tensors are.

A tensor owns its part of the slot. Ctrl-C may come between any two lines: a tensor that it leaves
without a reference gives its part back (the store keeps it while the drive uses it). The part is
used again once the device is idle, since copies without an event may be queued on any stream.

Knows torch; never the store. One thread at a time may call.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from memascend.base.interfaces import HostMemory
from memascend.base.units import page_down
from memascend.memory.pool import Lease, Pool

#: With so many every transfer makes progress: one slot fills while another empties.
SLOT_COUNT_MIN = 2
#: Most tensors that share a slot: each takes whole parts, which bounds the transfers in flight.
PART_COUNT = 16


class _Slot:
    """A leased slot, given back with the last tensor that was cut from it."""

    def __init__(self, lease: Lease) -> None:
        self.memory = lease.slot
        self.cut_bytes = 0  # from its start
        self._lease = lease

    def fits(self, nbytes: int) -> bool:
        """Return whether a tensor fits behind those that were cut."""
        return self.cut_bytes + nbytes <= self.memory.nbytes


class Slots:
    """Slots of one size, leased in turn."""

    def __init__(
        self,
        *,
        memory: HostMemory,
        component: str,
        wait_idle: Callable[[], object] | None = None,
    ) -> None:
        """Start without slots; `resize` takes them.

        Args:
            memory: Page-locked host memory.
            component: Name in the ledger.
            wait_idle: Waits until the device is idle; None when it is the CPU.
        """
        self._pool = Pool(memory=memory, component=component, budget_bytes=0)
        self._wait_idle = wait_idle
        self._slot_bytes = self._part_bytes = self._slot_count = 0
        self._pieces: dict[int, weakref.finalize[Any, Any]] = {}  # by address
        self._leased = weakref.WeakSet[_Slot]()
        self._last: Callable[[], _Slot | None] = _no_slot  # leased last; None once it is free
        self._lost: deque[_Slot] = deque()  # of tensors that were dropped and not freed

    def __len__(self) -> int:
        return self._slot_count

    @property
    def free_count(self) -> int:
        """Number of slots from which no tensor is cut."""
        return self._slot_count - len(self._leased)

    def resize(self, *, slot_bytes: int, slot_count: int) -> None:
        """Free all slots, and take new ones.

        Raises:
            ValueError: A slot is leased.
            HostMemoryError: There is not enough memory.
        """
        self._slot_count = 0
        self._pool.resize(
            slot_bytes * slot_count, slot_bytes_max=slot_bytes, segment_bytes=slot_bytes
        )
        self._slot_bytes, self._slot_count = slot_bytes, slot_count
        # Parts are whole pages, for direct I/O; slots too small for that are not shared.
        self._part_bytes = page_down(slot_bytes // PART_COUNT) or slot_bytes

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` can be cut."""
        last = self._last()
        return (last is not None and last.fits(nbytes)) or self.free_count > 0

    def cut(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Cut a tensor from the slot that was leased last, else from the next in turn."""
        nbytes = numel * dtype.itemsize
        slot = self._last()
        if slot is None or not slot.fits(nbytes):
            lease = self._pool.acquire(self._slot_bytes)
            if lease is None:
                raise AssertionError("no slot is free: call has_room() first")
            slot = _Slot(lease)
            self._leased.add(slot)
            self._last = weakref.ref(slot)
        piece = slot.memory[slot.cut_bytes :][:nbytes].view(dtype)
        slot.cut_bytes += -(-nbytes // self._part_bytes) * self._part_bytes
        owning = weakref.finalize(piece, self._lost.append, slot)
        owning.atexit = False
        self._pieces[piece.data_ptr()] = owning
        return piece

    def free(self, piece: torch.Tensor) -> None:
        """Free a tensor; after the last one of its slot the slot can be leased again."""
        self.expect_cut(piece)
        self._pieces.pop(piece.data_ptr()).detach()

    def expect_cut(self, piece: torch.Tensor) -> None:
        """Raise an error unless a tensor, and not a view of it, was cut and not freed."""
        owning = self._pieces.get(piece.data_ptr())
        if owning is None or (owning.peek() or [None])[0] is not piece:
            raise AssertionError(
                f"{tuple(piece.shape)} elements of {piece.dtype} are not a cut tensor. likely "
                "cause: it was given back before, or is a view. fix: keep the tensor that take() "
                "returned, and give it back once"
            )

    def recover(self) -> bool:
        """Free the tensors that Ctrl-C left without a reference; return whether there were any."""
        count = len(self._lost)
        if count and self._wait_idle is not None:
            self._wait_idle()
        for _ in range(count):  # not all: more may come while the device is waited for
            self._lost.popleft()
        return count > 0


def _no_slot() -> None:
    """Stand for a reference to no slot."""


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
