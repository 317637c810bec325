"""Slots of shards: leased, and let go; copied from still, or whole still and worth keeping.

A pass over the model is often followed by one in the opposite order: backward after forward, or the
recomputation of a layer and then its backward. What was used last is then needed first, so slots
are given up oldest first, and only when another shard needs the room. No memory is taken for this.

Only what equals the store may be put here, and it is forgotten before anybody else writes the key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from memascend.base.interfaces import Event, Ticket
from memascend.memory.pool import Lease, Pool
from memascend.streaming.loans import Loans
from memascend.streaming.shards import Shard, ShardState


class KeptSlots:
    """Slots of shards that were let go, until another shard needs them."""

    def __init__(self, pool: Pool, loans: Loans) -> None:
        """Begin with none.

        Args:
            pool: Of the slots; without a budget it has no need to keep anything.
            loans: Of shards that are read in no slot.
        """
        self._pool = pool
        self._loans = loans
        self._kept: dict[Shard, None] = {}  # let go longest ago first
        self._copying: deque[tuple[Event, Lease]] = deque()

    def put(self, shard: Shard) -> None:
        """Take a shard that is let go, to keep it where it may be given again."""
        if self._pool.is_bounded and shard.equals_store and shard.lease is not None:
            shard.state = ShardState.KEPT
            self._kept[shard] = None
        else:
            self._free(shard)

    def take(self, shard: Shard) -> None:
        """Hand a kept shard back: its slot is the caller's again."""
        del self._kept[shard]

    def forget(self, shard: Shard) -> None:
        """Free the slot of a shard if it is kept; have nobody read it in the store's memory."""
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

        None when only the caller could make room: then the shard does without a slot.

        Args:
            nbytes: Of the shard.
            writes: Transfers out of slots, oldest first; those that are over are taken off.
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
        """Free slots whose copies turn out to be over."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()[1].release()

    def free_oldest(self) -> bool:
        """Give up the shard that was let go longest ago; False when none is kept.

        A copy out of its slot is waited for: giving up others meanwhile would not be sooner, since
        theirs were issued later.
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
        """Wait for the oldest copy if one is out of a slot that suits; False when none is."""
        if any(self._pool.suits(lease.slot_bytes, nbytes) for _, lease in self._copying):
            self._wait_copy()
            return True
        return False

    def abandon(self, shards: Iterable[Shard]) -> None:
        """Give up shards and their slots in whatever state they are, kept or in use.

        Copies that are noted stay noted; a slot is free once nothing in flight holds it.
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
        # Not before: Ctrl-C may come at any line, and the copy still reads the slot.
        self._copying.popleft()
        lease.release()

    def _free(self, shard: Shard) -> None:
        lease, copied = shard.lease, shard.copied
        if shard.is_lent:
            self._loans.let_go(shard)
        if lease is not None and copied is not None:
            self._copying.append((copied, lease))
        shard.leave()
        if lease is not None and copied is None:  # device memory has its own order of use
            lease.release()
