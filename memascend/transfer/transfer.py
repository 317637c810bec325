"""Transfers between drive and device through memory that is given back when they are over.

Knows tickets and keys; neither the store nor the owner of the memory. One thread at a time may
call; Ctrl-C may come anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from memascend.base.interfaces import Ticket
from memascend.base.waiting import Ended
from memascend.transfer.pending import Pending


class Transfer:
    """A range of a key on its way, in one or two stages. It is a ticket itself.

    A read has one stage, the drive's. A write has two: the copy into the memory, and the drive's.
    """

    def __init__(
        self,
        *,
        key: str,
        staged: torch.Tensor,
        offset_bytes: int,
        ticket: Ticket,
        then: Callable[[], Ticket] | None = None,
    ) -> None:
        """Take over a stage in flight.

        Args:
            key: The key in the store.
            staged: The memory of the range.
            offset_bytes: Offset of the range in the key.
            ticket: The first stage.
            then: Starts the second stage, once the first is over; None: there is none.
        """
        self.key, self.staged = key, staged
        self._offset_bytes = offset_bytes
        self._ticket, self._then = ticket, then

    @property
    def stage(self) -> Ticket:
        """The stage in flight; any thread may wait for it."""
        return self._ticket

    @property
    def is_submitted(self) -> bool:
        """Whether the last stage was started."""
        return self._then is None

    def overlaps(self, begin: int, end: int) -> bool:
        """Return whether the range overlaps bytes [begin, end) of the key."""
        return self._offset_bytes < end and begin < self._offset_bytes + self.staged.nbytes

    def advance(self) -> bool:
        """Start the last stage if the one before is over; return whether it was started."""
        if self._then is not None and self._ticket.done():
            self.submit()
        return self.is_submitted

    def submit(self) -> None:
        """Start the last stage, after waiting for the one before. Only `wait` raises errors."""
        if self._then is None:
            return
        try:
            self._ticket.wait()
            ticket = self._then()
        except Exception as error:
            ticket = Ended(error)
        # In this order: if Ctrl-C comes between, the last stage is started again.
        self._ticket = ticket
        self._then = None

    def done(self) -> bool:
        """Return whether all stages are over."""
        return self._then is None and self._ticket.done()

    def wait(self) -> None:
        """Wait until all stages are over.

        Raises:
            StoreError: The transfer failed.
        """
        self.submit()
        self._ticket.wait()

    def abandon(self) -> bool:
        """Wait, and ignore errors; return whether the memory is free.

        It is not if the program is about to end, and a silent drive may still use it.
        """
        with suppress(Exception):
            self.wait()
        return self.done()


class Transfers:
    """Transfers that end in the order in which they were added; `wait_all` raises their errors."""

    def __init__(self, release: Callable[[Transfer], object]) -> None:
        """Start with no transfers.

        Args:
            release: Called with each transfer that is over, to free its memory.
        """
        self._pending: Pending[Transfer] = Pending(release)
        self._error: Exception | None = None  # the first since wait_all
        self._failed: set[str] = set()  # keys of transfers that failed

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Transfer]:
        """Return the transfers that have not ended, oldest first."""
        return iter(self._pending)

    def add(self, transfer: Transfer) -> None:
        """Take over a transfer, and submit all that can be without waiting."""
        self._pending.add(transfer, transfer)
        self._advance()

    def submit(self, *keys: str) -> None:
        """Submit all transfers, or all up to the last one of `keys`."""
        while any(not one.is_submitted and (not keys or one.key in keys) for one in self):
            next(one for one in self if not one.is_submitted).submit()

    def submit_overlapping(self, key: str, begin: int, end: int) -> None:
        """Submit the transfers of a key up to the last one that overlaps bytes [begin, end)."""
        waiting = [one for one in self._pending if not one.is_submitted and one.key == key]
        # In order, earlier ones included: they may overlap one another.
        while any(one.overlaps(begin, end) for one in waiting):
            waiting.pop(0).submit()

    def end_done(self) -> None:
        """End the oldest transfers that are over, and submit others, without waiting."""
        self._advance()
        while (oldest := next(iter(self), None)) is not None and oldest.done():
            self.wait_oldest()

    def wait_oldest(self) -> None:
        """Wait for the oldest transfer; an error is kept for `wait_all`."""
        oldest = next(iter(self))
        try:
            self._pending.wait_oldest()
        except Exception as error:
            if not oldest.done():
                raise  # at program exit: a silent drive may still read the memory
            self._error = self._error or error
            self._failed.add(oldest.key)

    def wait_all(self) -> None:
        """Wait until all transfers are over.

        Raises:
            StoreError: The first that failed since the last call; the others have been waited for.
        """
        while self._pending:
            self.wait_oldest()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take_failure(self, key: str) -> bool:
        """Return whether a transfer of a key failed since the last call."""
        has_failed = key in self._failed
        self._failed.discard(key)
        return has_failed

    def _advance(self) -> None:
        """Submit transfers in order, up to the first whose copy is not over."""
        for transfer in self._pending:
            if not transfer.advance():
                return
