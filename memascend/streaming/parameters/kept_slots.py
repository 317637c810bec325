"""Slots of shards that were let go: some are still being copied from, some still hold the shard.

A pass over the model is often followed by one in the opposite order: backward after forward, or the
recomputation of a layer and then its backward. The shards used last are then needed first, so slots
are given up oldest first, and only when another shard needs the room. This takes no extra memory.

Only shards that equal the store are kept, and a shard is forgotten before its key is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from memascend.base.interfaces import Event, Ticket
from memascend.memory.pool import Lease, Pool
from memascend.streaming.parameters.loans import Loans
from memascend.streaming.parameters.shard import Shard, ShardState


class KeptSlots:
    """Slots of shards that were let go, until another shard needs them."""

    def __init__(self, pool: Pool, loans: Loans) -> None:
        """Start with no kept slots.

        Args:
            pool: The pool of the slots; if it has no budget, no slot is kept.
            loans: Loans of shards that are read without a slot.
        """
        self._pool = pool
        self._loans = loans
        self._kept: dict[Shard, None] = {}  # oldest first
        self._copying: deque[tuple[Event, Lease]] = deque()

    def put(self, shard: Shard) -> None:
        """Keep the slot of a shard that is let go, if it equals the store; else free it."""
        if self._pool.is_bounded and shard.equals_store and shard.lease is not None:
            shard.state = ShardState.KEPT
            self._kept[shard] = None
        else:
            self._free(shard)

    def take(self, shard: Shard) -> None:
        """Return a kept shard and its slot to the caller."""
        del self._kept[shard]

    def forget(self, shard: Shard) -> None:
        """Free the slot of a shard if it is kept, and end its loan."""
        if shard.state is ShardState.KEPT:
            self.take(shard)
            self._free(shard)
        self._loans.end(shard)

    def drain(self) -> None:
        """Free every slot, once the copies out of it are over, and end every loan."""
        while self.free_oldest():
            pass
        while self._copying:
            self._wait_copy()
        self._loans.end_all()

    def acquire(self, nbytes: int, writes: deque[Ticket]) -> Lease | None:
        """Lease a free slot, else one that is about to become free, else a new one if allowed.

        Returns None when only the caller could make room: the shard then gets no slot.

        Args:
            nbytes: Size of the shard.
            writes: Transfers out of slots, oldest first; finished ones are removed.
        """
        if self._pool.slot_bytes(nbytes) == 0:
            return None
        while True:
            self.free_passed()
            while writes and writes[0].done():
                writes.popleft().wait()
            lease = self._pool.acquire(nbytes)
            if lease is not None:
                return lease
            if self.free_oldest() or self._wait_for_one(nbytes):
                continue
            if writes:
                writes.popleft().wait()
            elif not self._pool.grow(nbytes):
                return None

    def free_passed(self) -> None:
        """Free slots whose copies are over, without waiting."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()[1].release()

    def free_oldest(self) -> bool:
        """Give up the shard that was let go longest ago; return False when none is kept.

        Waits for a copy out of its slot: the copies of other kept shards were issued later.
        """
        oldest = next(iter(self._kept), None)
        if oldest is None:
            return False
        is_copied_from = oldest.copied is not None
        self.forget(oldest)
        if is_copied_from:
            while self._copying:
                self._wait_copy()
        return True

    def _wait_for_one(self, nbytes: int) -> bool:
        """Wait for the oldest copy if a suitable slot is being copied; False when none is."""
        if any(self._pool.suits(lease.slot_bytes, nbytes) for _, lease in self._copying):
            self._wait_copy()
            return True
        return False

    def abandon(self, shards: Iterable[Shard]) -> None:
        """Give up shards and their slots in any state, kept or in use.

        Noted copies stay noted; a slot is free once no transfer in flight holds it.
        """
        for shard in shards:
            self._kept.pop(shard, None)
            if shard.copied is not None:
                shard.copied.synchronize()
            if shard.lease is not None:
                shard.lease.release()
            self._loans.end(shard)
            shard.leave()

    def _wait_copy(self) -> None:
        event, lease = self._copying[0]
        event.synchronize()
        # After the wait: if Ctrl-C ends it, the copy still reads the slot.
        self._copying.popleft()
        lease.release()

    def _free(self, shard: Shard) -> None:
        lease, copied = shard.lease, shard.copied
        if shard.is_lent:
            self._loans.let_go(shard)
        if lease is not None and copied is not None:
            self._copying.append((copied, lease))
        shard.leave()
        if lease is not None and copied is None:  # device memory is reused in stream order
            lease.release()
