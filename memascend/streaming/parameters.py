"""The parameter path between drive and host: a shard is staged in a slot, moved, let go.

Knows torch, the pool and the store; never DeepSpeed. A shard holds a slot only while it travels:
the slot goes back as soon as the copy to the device has passed (an event says so where copies are
asynchronous), not when the device copy is released. One thread at a time may call.

Who may still touch a slot is settled below this file: the slot is free again only when the lease
was released and the store has reaped every transfer on it.

With a budget, host memory is bounded whatever the model is. A shard too large for a slot is
assembled in device memory, chunk by chunk through the staging slots, and so is one that finds no
room. Which shards are staged never depends on time or on where they found room, only on sizes and
calls: DeepSpeed decides by it what to gather, and every rank must decide alike. So a rank that is
not alone must not go by `has_arrived`. A slot whose shard was let go keeps its bytes until another
shard needs the room, or it is read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from memascend.base.interfaces import Event, Lender, TensorIO, Ticket
from memascend.base.waiting import wait_all
from memascend.errors import StoreError
from memascend.memory.pool import Pool
from memascend.streaming.in_chunks import InChunks
from memascend.streaming.kept_slots import KeptSlots
from memascend.streaming.loans import Loans
from memascend.streaming.shards import Shard, Shards, ShardState
from memascend.streaming.staging import StagingSlots
from memascend.streaming.walk import Walk

#: Casts of updated parameters that may wait for the drive; bounds the slots of writing back.
WRITE_BACK_COUNT_MAX = 4
#: The same with a budget, which bounds their bytes: tiny shards must not wait for one another.
WRITE_BACK_COUNT_MAX_IN_BUDGET = 64


class ParameterStream:
    """Stages shards. See the module's head for the life of a slot."""

    def __init__(
        self,
        *,
        store: TensorIO,
        pool: Pool,
        prefetch_bytes: int | None = None,
        staging: StagingSlots | None = None,
        device: torch.device | None = None,
        walk: Walk | None = None,
        lender: Lender | None = None,
    ) -> None:
        """Take no slot yet.

        Args:
            store: Where shards are.
            pool: Where they are staged.
            prefetch_bytes: Bytes that may be read ahead; None derives them from the sizes.
            staging: Through which shards travel that have no slot; needed with a budget.
            device: Where those are assembled.
            walk: The optimizer's, which may still be writing shards.
            lender: Lends shards that are in memory already; None: each is copied to a slot.
        """
        self.pool = pool
        self._store = store
        self._prefetch_bytes = prefetch_bytes
        self.walk = walk or Walk()
        self._shards = Shards()
        self._staged: dict[Shard, None] = {}  # asked for last, last
        self._changed: dict[Shard, None] = {}
        self._loans = Loans(lender)
        self._kept = KeptSlots(pool, self._loans)
        self._writes: deque[Ticket] = deque()
        self._chunks = InChunks(staging=staging, device=device, walk=self.walk, loans=self._loans)

    def shard(self, key: str, numel: int, dtype: torch.dtype, owner: Any = None) -> Shard:
        """Make the record of a shard, once for each."""
        return self._shards.make(key, numel, dtype, owner)

    @property
    def share_bytes(self) -> int:
        """Bytes that one turn may take, and that may be read ahead: together they fit."""
        return self.pool.budget_bytes // 2

    def take_changes(self) -> Collection[Shard]:
        """Return the shards that have been staged, have arrived or were let go since last asked."""
        changed, self._changed = self._changed, {}
        return changed

    # -- drive -> host or device -----------------------------------------------------------------

    def read_ahead(self, shards: Iterable[Shard]) -> None:
        """Start reading shards, in order, as far as may be read ahead now.

        Stops at the first that does not fit, so that what is needed soonest is never overtaken. One
        that has no slot ever is passed over: it is read when it is needed. Of the first of those
        first chunks are read ahead, which nobody sees.
        """
        for shard in self._staged:
            self._start_late(shard)
        limit_bytes = self._shards.prefetch_bytes(self._prefetch_bytes)
        room_bytes = min(limit_bytes, self.share_bytes) - self._staged_bytes()
        starts_chunks = limit_bytes > 0
        for shard in shards:
            cost_bytes = self.pool.slot_bytes(shard.nbytes)
            if shard.is_staged:
                continue
            if cost_bytes == 0:
                if starts_chunks:
                    self._chunks.read_ahead(shard)
                starts_chunks = False
                continue
            if cost_bytes > room_bytes:
                return
            room_bytes -= cost_bytes
            self._read(shard)
            shard.is_ahead = True

    def read_now(self, shards: Iterable[Shard]) -> None:
        """Have shards staged; on return each has its tensor.

        What was read ahead gives way to them, furthest first, until they fit the budget.

        Raises:
            StoreError: A read failed; everything that was on its way is let go.
        """
        needed = dict.fromkeys(shards)
        for shard in needed:
            shard.is_ahead = False
        absent = [shard for shard in needed if not shard.is_staged]
        self._make_room(absent)
        for shard in absent:
            self._read(shard)
        self._wait(needed)

    def has_arrived(self, shard: Shard) -> bool:
        """Return whether a shard can be had now without waiting for anything."""
        if not self.walk.has_passed(shard.key):
            return False
        self._start_late(shard)
        if shard.state is not ShardState.READING:
            return shard.state is not ShardState.ABSENT
        is_read = shard.read is None or shard.read.done()
        return self._loans.offers(shard) if shard.lease is None else is_read

    def wait_reads(self) -> None:
        """Wait for every read in flight.

        Raises:
            StoreError: A read failed; everything that was on its way is let go.
        """
        self._wait(self._staged)

    def read_into(self, shard: Shard, target: torch.Tensor) -> None:
        """Fill a flat tensor that is not a slot: of any device, at any address, of any length."""
        self.walk.wait_for([shard.key])
        if self._chunks.staging is not None and target.device.type != "cpu":
            self._chunks.staging.read(key=shard.key, target=target)
        else:
            self._chunks.wait(shard)
            self._store.read(key=shard.key, target=target).wait()

    # -- host -> drive ---------------------------------------------------------------------------

    def stage(self, shard: Shard) -> torch.Tensor | None:
        """Give a slot to be filled by the caller and then stored with `write`.

        None when the budget has no slot for it: then the caller keeps the shard on the device and
        stores it with `write_from`.
        """
        if shard.is_lent:  # the store alone writes there
            self.drop(shard)
        self._make_room([shard])
        self._kept.forget(shard)
        self._stage(shard)
        self._note(shard, ShardState.STAGED)
        if shard.tensor is None:
            self.drop(shard)
        return shard.tensor

    def write(self, shard: Shard) -> None:
        """Store a staged shard and let it go. On return the bytes are in the store."""
        tensor = shard.tensor
        if tensor is None:
            raise AssertionError(f"{shard.key} has no tensor to store")
        shard.equals_store = False
        try:
            if shard.lease is None:
                self.write_from(shard, tensor)
            else:
                self._chunks.wait(shard)
                self._store.write(
                    key=shard.key,
                    source=tensor,
                    hold=shard.lease.hold(),
                    capacity_bytes=shard.lease.slot_bytes,
                ).wait()
        finally:
            self.drop(shard)

    def write_from(self, shard: Shard, source: torch.Tensor) -> None:
        """Store a flat tensor of any device, chunk by chunk; on return it is in the store."""
        self.forget(shard)
        self._chunks.write(shard, source)
        self._chunks.wait(shard)

    def write_cast(self, shard: Shard, source: torch.Tensor) -> None:
        """Cast `source` on its way and start storing it; `source` may be reused on return."""
        self.forget(shard)
        self._make_room([shard])
        bounded = self.pool.is_bounded
        count_max = WRITE_BACK_COUNT_MAX_IN_BUDGET if bounded else WRITE_BACK_COUNT_MAX
        while len(self._writes) >= count_max:
            self._writes.popleft().wait()
        self._stage(shard)
        try:
            if shard.lease is None or shard.tensor is None:
                self._chunks.write(shard, source)
            else:
                self._chunks.wait(shard)
                shard.tensor.copy_(source)
                self._writes.append(
                    self._store.write(
                        key=shard.key,
                        source=shard.tensor,
                        hold=shard.lease.hold(),
                        capacity_bytes=shard.lease.slot_bytes,
                    )
                )
        finally:
            self.drop(shard)

    def recast(self, shard: Shard, dtype: torch.dtype, device: str) -> None:
        """Store a shard in another dtype from now on; on return it is in the store.

        Args:
            shard: Nobody uses it.
            dtype: Its values are rounded to it.
            device: Where all of it is for that long.

        Raises:
            StoreError: The drive failed; the shard is lost.
            StoreFullError: The drive has no room for it; the same.
        """
        self.read_now([shard])
        assert shard.tensor is not None
        whole = shard.tensor.to(device=device, dtype=dtype, copy=True)
        self.forget(shard)
        self._store.discard(key=shard.key)
        self._shards.recast(shard, dtype)
        self.write_cast(shard, whole)
        self.wait_writes()

    def wait_writes(self) -> None:
        """Wait for every write in flight.

        Raises:
            StoreError: A write failed; the remaining ones have been waited for.
        """
        wait_all(self._writes_in_flight())

    def _writes_in_flight(self) -> Iterator[Callable[[], object]]:
        """Yield what waits for each write; what was not reached stays noted."""
        while self._writes:
            yield self._writes.popleft().wait
        yield self._chunks.wait_writes

    # -- letting go ------------------------------------------------------------------------------

    def drop(self, shard: Shard, event: Event | None = None) -> None:
        """Let a shard go, if it is staged: at once, or once `event` has passed."""
        if not shard.is_staged:
            return
        self._staged.pop(shard, None)
        ticket, shard.read = shard.read, None
        shard.is_ahead = False
        try:
            if ticket is not None:
                ticket.wait()
        finally:
            shard.copied = event or shard.copied
            self._kept.put(shard)
            self._changed[shard] = None

    def forget(self, shard: Shard) -> None:
        """Drop a shard, and have it read from the drive when it is needed again."""
        self.drop(shard)
        self._kept.forget(shard)
        self._chunks.forget(shard)

    def forget_all(self) -> None:
        """Drop and forget every shard; on return every slot is free but for writes.

        For whoever is about to change keys in the store by another way than this stream.
        """
        for shard in tuple(self._staged):
            self.drop(shard)
        self._kept.drain()
        self._chunks.forget()

    def recover(self, *, besides: Collection[Shard] = ()) -> list[Shard]:
        """Drop and forget all shards but some, in whatever state Ctrl-C at any line left them."""
        lost = [shard for shard in self._shards.made if shard not in besides]
        self._kept.abandon(lost)
        for shard in lost:
            self._staged.pop(shard, None)
        self._changed.clear()
        self._chunks.forget()
        return lost

    # -- slots -----------------------------------------------------------------------------------

    def _read(self, shard: Shard) -> None:
        """Start reading a shard; what is kept of it needs no read, what is still old waits."""
        is_kept = shard.state is ShardState.KEPT
        if is_kept:
            self._kept.take(shard)
        self._stage(shard, is_read=True)
        try:
            if shard.lease is not None and not is_kept:
                shard.is_late = True
                self._start_late(shard)
        except BaseException:
            self.drop(shard)
            raise

    def _start_late(self, shard: Shard) -> None:
        """Start the read of a shard that waits for its new value, if that is there."""
        if not shard.is_late or not self.walk.has_passed(shard.key):
            return
        assert shard.lease is not None
        assert shard.tensor is not None
        self._chunks.wait(shard)
        shard.read = self._store.read(
            key=shard.key,
            target=shard.tensor,
            hold=shard.lease.hold(),
            capacity_bytes=shard.lease.slot_bytes,
        )
        shard.is_late = False

    def _wait(self, needed: Collection[Shard]) -> None:
        """Wait for the reads of these shards, and assemble those that have no slot."""
        reading = [one for one in self._staged if one.state is ShardState.READING]
        try:
            # Those with a ticket first: meanwhile the drive is busy with them anyway.
            for shard in sorted(reading, key=lambda one: one.read is None):
                if shard not in needed:
                    continue
                if shard.read is None:
                    self.walk.wait_for([shard.key])
                self._start_late(shard)
                ticket, shard.read = shard.read, None
                if ticket is not None:
                    ticket.wait()
                elif shard.tensor is None:
                    self._chunks.read(shard)
                shard.equals_store = True
                self._note(shard, ShardState.STAGED)
        except BaseException:
            for shard in reading:
                with suppress(Exception):  # the first error is the one to raise
                    self.drop(shard)
            raise

    def _stage(self, shard: Shard, *, is_read: bool = False) -> None:
        """Take a shard in: into its kept slot, into another one, or without."""
        if shard.is_staged:
            raise AssertionError(f"{shard.key} is staged already")
        if shard.lease is None and not (is_read and self._loans.offers(shard)):
            shard.lease = self._kept.acquire(shard.nbytes, self._writes)
            if shard.lease is not None:
                shard.tensor = shard.lease.view(shard.numel, shard.dtype)
        self._staged[shard] = None
        self._note(shard, ShardState.READING)

    def _note(self, shard: Shard, state: ShardState) -> None:
        shard.state = state
        self._changed[shard] = None

    def _make_room(self, shards: Iterable[Shard]) -> None:
        """Let go what was read ahead, furthest first, until these shards fit the budget."""
        needed_bytes = sum(self.pool.slot_bytes(one.nbytes) for one in shards)
        needed_bytes += self._staged_bytes()
        for shard in reversed([one for one in self._staged if one.is_ahead]):
            if needed_bytes <= self.pool.budget_bytes:
                return
            needed_bytes -= self.pool.slot_bytes(shard.nbytes)
            with suppress(StoreError):  # nobody needs it now; who does will see the error
                self.drop(shard)

    def _staged_bytes(self) -> int:
        return sum(self.pool.slot_bytes(one.nbytes) for one in self._staged)
