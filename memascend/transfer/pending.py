"""A FIFO of memory that is kept until the transfer or copy in flight on it is over.

An entry leaves the list only after its transfer is over: Ctrl-C may end a wait, and the drive or
the device then still uses the memory. One thread at a time may call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Generic, TypeVar

from memascend.base.interfaces import Ticket
from memascend.base.waiting import wait_all

Kept = TypeVar("Kept")


class Pending(Generic[Kept]):
    """Pairs of a ticket and an object to keep until it is done, oldest first. A ticket of all."""

    def __init__(self, release: Callable[[Kept], object] | None = None) -> None:
        """Start with no entries.

        Args:
            release: Called with the object of each entry whose transfer is over.
        """
        self._release = release
        self._entries: deque[tuple[Ticket, Kept]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Kept]:
        """Return the objects, oldest first."""
        return map(itemgetter(1), self._entries)

    def add(self, ticket: Ticket, kept: Kept) -> None:
        """Keep an object until a transfer is over."""
        self._entries.append((ticket, kept))

    def release_done(self) -> None:
        """Release the oldest entries as far as they are over, without waiting.

        Raises:
            StoreError: One of them failed; it is released.
        """
        while self._entries and self._entries[0][0].done():
            self.wait_oldest()

    def wait_oldest(self) -> None:
        """Wait for the oldest entry, and release it.

        Raises:
            StoreError: It failed; it is released.
        """
        ticket, kept = self._entries[0]
        try:
            ticket.wait()
        finally:
            if ticket.done():  # else Ctrl-C ended the wait, or the program is about to end
                self._entries.popleft()
                if self._release is not None:
                    self._release(kept)

    def done(self) -> bool:
        """Return whether all entries are over; releases none."""
        return all(ticket.done() for ticket, _ in self._entries)

    def wait(self) -> None:
        """Wait for all entries and release them; then raise the first error."""
        wait_all([self.wait_oldest] * len(self._entries))
