"""Host memory of shards that were let go: kept slots, copies still in flight, and loans.

A pass over the model is often followed by one in the opposite order: backward after forward, or the
recomputation of a layer and then its backward. The shards used last are then needed first, so slots
are given up oldest first, and only when another shard needs the room. This takes no extra memory.
Only shards that equal the store are kept, and a shard is dropped before its key is written.

If the store has all of a shard in its own memory, it lends that memory: such a shard needs no slot
and no second copy on the host. A key must not be written while it is lent, and a copy to the device
may still run after its shard was let go. So a writer first ends the loan, which waits for the copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from memascend.base.interfaces import Event, Lender
from memascend.base.waiting import CopyTicket
from memascend.memory.pool import Lease, Pool
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.transfer.pending import Pending


class ShardMemory:
    """The host memory of one stream's shards, besides those in use. One thread at a time."""

    def __init__(self, pool: Pool, lender: Lender | None) -> None:
        """Start with nothing kept and nothing lent.

        Args:
            pool: The pool of the slots; if it has no budget, no slot is kept.
            lender: Lends keys that the store has in memory; None for no loans.
        """
        self._pool = pool
        self._lender = lender
        self._kept: dict[Shard, None] = {}  # oldest first
        self._copies: dict[Shard, Event] = {}  # the last copy out of a slot or loan
        self._copying: Pending[Lease] = Pending(Lease.release)

    # -- slots -----------------------------------------------------------------------------------

    def let_go(self, shard: Shard, event: Event | None) -> None:
        """Keep the slot of a shard that is let go, if it equals the store; else free its memory.

        Args:
            shard: A staged shard.
            event: Passes when the last copy out of its memory is over; None without a new copy.
        """
        if event is not None and shard.is_reused:
            self._copies[shard] = event
        equals_store = shard.state in (ShardState.ARRIVED, ShardState.RECALLED)
        if self._pool.is_bounded and equals_store and shard.lease is not None:
            shard.become(ShardState.KEPT)
            self._kept[shard] = None
        else:
            self._free(shard)

    def take(self, shard: Shard) -> None:
        """Return a kept shard and its slot to the caller."""
        del self._kept[shard]

    def drop(self, shard: Shard) -> None:
        """Free the slot of a shard if it is kept, and end its loan."""
        if shard.state is ShardState.KEPT:
            self.take(shard)
            self._free(shard)
        self._end_loan(shard)

    def drop_all(self) -> None:
        """Free every slot, once the copies out of it are over, and end every loan."""
        while self._free_oldest():
            pass
        self._copying.wait()
        for shard in list(self._copies):
            self._end_loan(shard)

    def acquire(self, nbytes: int, writes: Pending[str]) -> Lease | None:
        """Lease a free slot, else one that is about to become free, else a new one if allowed.

        Returns None when only the caller could make room: the shard then gets no slot.

        Args:
            nbytes: Size of the shard.
            writes: Transfers out of slots, oldest first; finished ones are removed.
        """
        if self._pool.slot_bytes(nbytes) == 0:
            return None
        while True:
            self._copying.release_done()
            writes.release_done()
            lease = self._pool.acquire(nbytes)
            if lease is not None:
                return lease
            if self._free_oldest() or self._wait_for_one(nbytes):
                continue
            if writes:
                writes.wait_oldest()
            elif not self._pool.grow(nbytes):
                return None

    def recover(self, shards: Iterable[Shard]) -> None:
        """Give up shards and their memory in any state, kept or in use.

        A slot is free once no transfer in flight holds it.
        """
        for shard in shards:
            self._kept.pop(shard, None)
            if shard in self._copies:
                self._copies[shard].synchronize()
            if shard.lease is not None:
                shard.lease.release()
            self._end_loan(shard)
            shard.reset()

    def _free_oldest(self) -> bool:
        """Give up the shard that was let go longest ago; return False when none is kept.

        Waits for a copy out of its slot: the copies of other kept shards were issued later.
        """
        oldest = next(iter(self._kept), None)
        if oldest is None:
            return False
        is_copied_from = oldest in self._copies
        self.drop(oldest)
        if is_copied_from:
            self._copying.wait()
        return True

    def _wait_for_one(self, nbytes: int) -> bool:
        """Wait for the oldest copy if a suitable slot is being copied; False when none is."""
        if any(self._pool.suits(lease.slot_bytes, nbytes) for lease in self._copying):
            self._copying.wait_oldest()
            return True
        return False

    def _free(self, shard: Shard) -> None:
        if shard.is_lent:
            if shard not in self._copies:
                self._end_loan(shard)
            shard.reset()
            return
        lease, copied = shard.lease, None
        if lease is not None and (copied := self._copies.get(shard)) is not None:
            self._copying.add(CopyTicket(copied), lease)
            del self._copies[shard]
        shard.reset()
        if lease is not None and copied is None:  # device memory is reused in stream order
            lease.release()

    # -- loans -----------------------------------------------------------------------------------

    def offers(self, shard: Shard) -> bool:
        """Return whether a shard can be read in the store's memory."""
        return self._lender is not None and self._lender.lends(key=shard.key, dtype=shard.dtype)

    def lend(self, shard: Shard) -> None:
        """Point a DEFERRED shard's tensor at the store's memory; `offers` must be true."""
        assert self._lender is not None
        shard.tensor = self._lender.lend(key=shard.key, dtype=shard.dtype)
        shard.become(ShardState.LENT)

    def _end_loan(self, shard: Shard) -> None:
        """End a shard's loan once its copies are over; no effect without a loan."""
        event = self._copies.get(shard)
        if event is not None:
            event.synchronize()
        if self._lender is not None:
            self._lender.take_back(key=shard.key)
        # After the wait, which Ctrl-C may end.
        self._copies.pop(shard, None)
