"""Loans: shards that are read in the store's own memory, where that has all of them.

Such a shard needs no slot, and no copy of its own on the host. Nobody may write a key that is lent,
and a copy to the device may go on when its shard has long been let go: whoever is about to write
ends the loan first, which waits for the copy.

Knows shards, events and who lends. One thread at a time may call.
"""

from __future__ import annotations

from memascend.base.interfaces import Event, Lender
from memascend.streaming.shards import Shard


class Loans:
    """What is lent, and what of it is copied from still."""

    def __init__(self, lender: Lender | None) -> None:
        """Begin with none.

        Args:
            lender: None when nobody lends.
        """
        self._lender = lender
        self._copied: dict[Shard, Event] = {}  # let go, and behind the last copy

    def offers(self, shard: Shard) -> bool:
        """Return whether a shard can be read where the store has it."""
        return self._lender is not None and self._lender.lends(key=shard.key, dtype=shard.dtype)

    def take(self, shard: Shard) -> None:
        """Have a shard that is offered in the store's memory."""
        assert self._lender is not None
        shard.tensor = self._lender.lend(key=shard.key, dtype=shard.dtype)
        shard.is_lent = True

    def let_go(self, shard: Shard) -> None:
        """End the loan of a shard that is let go, unless a copy may still be under way."""
        if shard.copied is not None:
            self._copied[shard] = shard.copied
        elif shard not in self._copied:
            self.end(shard)

    def end(self, shard: Shard) -> None:
        """Let the key of a shard be written, once copies are over; harmless without a loan."""
        event = self._copied.get(shard)
        if event is not None:
            event.synchronize()
        if self._lender is not None:
            self._lender.take_back(key=shard.key)
        # Not before: Ctrl-C may end the wait.
        self._copied.pop(shard, None)

    def end_all(self) -> None:
        """End all that copies have kept."""
        for shard in list(self._copied):
            self.end(shard)
