"""Loans: shards that are read in the store's own memory, if the store keeps all of them there.

Such a shard needs no slot and no second copy on the host. A key must not be written while it is
lent, and a copy to the device may still run after its shard was let go. So a writer first ends the
loan, which waits for the copy.

Knows shards, events and the lender. One thread at a time may call.
"""

from __future__ import annotations

from memascend.base.interfaces import Event, Lender
from memascend.streaming.parameters.shard import Shard


class Loans:
    """The loans of one stream, and the copies that still read them."""

    def __init__(self, lender: Lender | None) -> None:
        """Start with no loans.

        Args:
            lender: Lends keys that the store has in memory; None for no loans.
        """
        self._lender = lender
        self._copied: dict[Shard, Event] = {}  # shards let go, and the event of the last copy

    def offers(self, shard: Shard) -> bool:
        """Return whether a shard can be read in the store's memory."""
        return self._lender is not None and self._lender.lends(key=shard.key, dtype=shard.dtype)

    def take(self, shard: Shard) -> None:
        """Point a shard's tensor at the store's memory; `offers` must be true."""
        assert self._lender is not None
        shard.tensor = self._lender.lend(key=shard.key, dtype=shard.dtype)
        shard.is_lent = True

    def let_go(self, shard: Shard) -> None:
        """End the loan of a shard that is let go, unless a copy may still be in flight."""
        if shard.copied is not None:
            self._copied[shard] = shard.copied
        elif shard not in self._copied:
            self.end(shard)

    def end(self, shard: Shard) -> None:
        """End a shard's loan once its copies are over; no effect without a loan."""
        event = self._copied.get(shard)
        if event is not None:
            event.synchronize()
        if self._lender is not None:
            self._lender.take_back(key=shard.key)
        # After the wait, which Ctrl-C may end.
        self._copied.pop(shard, None)

    def end_all(self) -> None:
        """End all loans that are open because of copies."""
        for shard in list(self._copied):
            self.end(shard)
