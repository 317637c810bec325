"""The parameter path between drive and host: a shard is staged in a slot, moved, let go.

Knows torch, the pool and the store; never DeepSpeed. A shard holds a slot only while it travels:
the slot is released as soon as the copy to the device has passed (marked by an event if copies are
asynchronous), not when the device copy is freed. One thread at a time may call, which the pool's
guard checks.

The layers below guard the memory of a slot: it is free again only when its lease is released and
the store has reaped every transfer on it.

With a budget, host memory is bounded for a model of any size. A shard that is too large for a slot,
or finds no free slot, is assembled in device memory, chunk by chunk through the staging slots. The
set of staged shards depends only on sizes and calls, never on time or on where a shard found room:
DeepSpeed decides from it which shards to gather, and all ranks must decide alike. So `has_arrived`
must not be used to decide with more than one rank. The slot of a shard that was let go keeps its
bytes until another shard needs the room, or the shard is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

import torch

from memascend.base.interfaces import Event, Lender, TensorIO
from memascend.base.waiting import Ended, wait_all
from memascend.errors import StoreError
from memascend.memory.guard import guarded
from memascend.memory.pool import Pool
from memascend.streaming.background import BackgroundStep
from memascend.streaming.hand_over import HandOver
from memascend.streaming.parameters.in_chunks import InChunks
from memascend.streaming.parameters.prefetch import PrefetchLimit
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.streaming.parameters.shard_memory import ShardMemory
from memascend.transfer.pending import Pending
from memascend.transfer.staging import StagingSlots

#: Casts of updated parameters whose writes may be in flight; bounds the slots of write-back.
WRITE_BACK_COUNT_MAX = 4
#: The same with a budget, which bounds their bytes: tiny shards must not wait for one another.
WRITE_BACK_COUNT_MAX_IN_BUDGET = 64


class ParameterStream:
    """Stages shards. The module's docstring describes the life of a slot."""

    def __init__(
        self,
        *,
        store: TensorIO,
        pool: Pool,
        prefetch_bytes: int | None = None,
        drive_count: int = 1,
        staging: StagingSlots | None = None,
        device: torch.device | None = None,
        background: BackgroundStep | None = None,
        hand_over: HandOver | None = None,
        lender: Lender | None = None,
    ) -> None:
        """Take no slot yet.

        Args:
            store: The store of the shards.
            pool: The pool of the slots.
            prefetch_bytes: Bytes that may be read ahead; None derives them from the sizes.
            drive_count: Drives whose queues reading ahead keeps full.
            staging: Staging slots for shards without a slot; needed with a budget.
            device: Where shards without a slot are assembled.
            background: The optimizer's walk, which may still be writing shards.
            hand_over: Slots that this walk fills.
            lender: Lends shards that the store has in memory; None: each is copied to a slot.
        """
        self.pool = pool
        self.guard = pool.guard
        self._store = store
        self._prefetch_limit = PrefetchLimit(prefetch_bytes, drive_count)
        self.background = background or BackgroundStep()
        self._hand_over = hand_over or HandOver()
        #: Returns whether a shard, by its key, must not be stored now.
        self.is_fixed: Callable[[str], bool] = lambda key: False
        self._shards: list[Shard] = []
        self._staged: dict[Shard, None] = {}  # in order of request
        self._ahead: set[Shard] = set()  # of these, read ahead and not needed yet
        self._changed: dict[Shard, None] = {}
        self._memory = ShardMemory(pool, lender)
        self._writes: Pending[str] = Pending()  # keys; the store holds the slots
        self._chunks = InChunks(
            staging=staging, device=device, background=self.background, memory=self._memory
        )

    @guarded
    def shard(self, key: str, numel: int, dtype: torch.dtype, owner: Any = None) -> Shard:
        """Make the record of a shard, once for each."""
        shard = Shard(key, numel, dtype, owner)
        self._shards.append(shard)
        self._prefetch_limit.note_made(shard.nbytes)
        return shard

    @property
    def share_bytes(self) -> int:
        """Bytes that one turn may take, and limit of read-ahead: half the budget each."""
        return self.pool.budget_bytes // 2

    def note_drives(self, drive_count: int) -> None:
        """Keep the queues of this many drives full from now on."""
        self._prefetch_limit.drive_count = drive_count

    @guarded
    def take_changes(self) -> Collection[Shard]:
        """Return the shards that were staged, arrived or were let go since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    # -- drive -> host or device -----------------------------------------------------------------

    @guarded
    def prefetch(self, shards: Iterable[Shard]) -> None:
        """Start reading shards, in order, as far as the read-ahead limit allows now.

        Stops at the first shard that does not fit, so that later shards never overtake it. Shards
        that never have a slot are skipped and read when needed. For the first such shard, start
        reading its leading chunks into free staging slots; its state stays ABSENT.
        """
        for shard in self._staged:
            self._start_delayed(shard)
        limit_bytes = self._prefetch_limit.nbytes
        room_bytes = min(limit_bytes, self.share_bytes) - self._staged_bytes()
        starts_chunks = limit_bytes > 0
        for shard in shards:
            cost_bytes = self.pool.slot_bytes(shard.nbytes)
            if shard.is_staged:
                continue
            if cost_bytes == 0:
                if starts_chunks:
                    self._chunks.prefetch(shard)
                starts_chunks = False
                continue
            if cost_bytes > room_bytes:
                return
            room_bytes -= cost_bytes
            self._read(shard)
            self._ahead.add(shard)

    @guarded
    def read_now(self, shards: Iterable[Shard]) -> None:
        """Stage shards; on return each has its tensor.

        Shards that were read ahead are let go, furthest first, until these fit the budget.

        Raises:
            StoreError: A read failed; all shards being read are let go.
        """
        needed = dict.fromkeys(shards)
        self._ahead.difference_update(needed)
        absent = [shard for shard in needed if not shard.is_staged]
        self._make_room(absent)
        for shard in absent:
            self._read(shard)
        self._wait(needed)

    @guarded
    def has_arrived(self, shard: Shard) -> bool:
        """Return whether `read_now` would return without waiting for this shard."""
        if not self.background.has_passed(shard.key):
            return False
        self._start_delayed(shard)
        if shard.state is ShardState.DEFERRED:
            return self._memory.offers(shard)
        if shard.state is ShardState.READING:
            return shard.read is None or shard.read.done()
        return shard.state is not ShardState.ABSENT

    @guarded
    def wait_reads(self) -> None:
        """Wait for every read in flight.

        Raises:
            StoreError: A read failed; all shards being read are let go.
        """
        self._wait(self._staged)

    @guarded
    def read_into(self, shard: Shard, target: torch.Tensor) -> None:
        """Fill a flat tensor that is not a slot, of any device, address and length."""
        self.background.wait_for([shard.key])
        if self._chunks.staging is not None and target.device.type != "cpu":
            self._chunks.staging.read(key=shard.key, target=target)
        else:
            self._chunks.wait(shard)
            self._store.read(key=shard.key, target=target).wait()

    # -- host -> drive ---------------------------------------------------------------------------

    @guarded
    def stage(self, shard: Shard) -> torch.Tensor | None:
        """Return the shard's slot, for the caller to fill and then store with `write`.

        Returns None when the budget has no slot for it: the caller then keeps the shard on the
        device and stores it with `write_from`.
        """
        if shard.is_lent:  # the store alone writes there
            self.let_go(shard)
        self._make_room([shard])
        self._memory.drop(shard)
        self._stage(shard, ShardState.CHANGED)
        if shard.tensor is None:
            self.let_go(shard)
        return shard.tensor

    @guarded
    def write(self, shard: Shard) -> None:
        """Store a staged shard and let it go. On return the bytes are in the store."""
        tensor = shard.tensor
        if tensor is None:
            raise AssertionError(f"{shard.key} has no tensor to store")
        if shard.state in (ShardState.ARRIVED, ShardState.RECALLED):
            shard.become(ShardState.CHANGED)
        try:
            self._expect_free(shard)
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
            self.let_go(shard)

    @guarded
    def write_from(self, shard: Shard, source: torch.Tensor) -> None:
        """Store a flat tensor of any device, chunk by chunk; on return it is in the store."""
        self._expect_free(shard)
        self.drop(shard)
        self._chunks.write(shard, source)
        self._chunks.wait(shard)

    @guarded
    def write_cast(self, shard: Shard, source: torch.Tensor) -> None:
        """Cast `source` and start storing it; `source` may be reused on return."""
        self._expect_free(shard)
        self.drop(shard)
        self._make_room([shard])
        bounded = self.pool.is_bounded
        count_max = WRITE_BACK_COUNT_MAX_IN_BUDGET if bounded else WRITE_BACK_COUNT_MAX
        while len(self._writes) >= count_max:
            self._writes.wait_oldest()
        self._stage(shard, ShardState.CHANGED)
        try:
            if shard.lease is None or shard.tensor is None:
                self._chunks.write(shard, source)
            else:
                self._chunks.wait(shard)
                shard.tensor.copy_(source)
                ticket = self._store.write(
                    key=shard.key,
                    source=shard.tensor,
                    hold=shard.lease.hold(),
                    capacity_bytes=shard.lease.slot_bytes,
                )
                self._writes.add(ticket, shard.key)
        finally:
            self.let_go(shard)

    @guarded
    def recast(self, shard: Shard, dtype: torch.dtype, device: str) -> None:
        """Change the dtype of a shard; on return its values are in the store in `dtype`.

        Args:
            shard: A shard that is not in use.
            dtype: The new dtype; values are rounded to it.
            device: Holds the whole shard meanwhile.

        Raises:
            StoreError: The drive failed; the shard is lost.
            StoreFullError: The drive has no room for it; the shard is lost.
        """
        self._expect_free(shard)
        self.read_now([shard])
        assert shard.tensor is not None
        whole = shard.tensor.to(device=device, dtype=dtype, copy=True)
        self.drop(shard)
        self._store.discard(key=shard.key)
        old_bytes, shard.dtype = shard.nbytes, dtype
        self._prefetch_limit.note_recast(old_bytes, shard.nbytes)
        self.write_cast(shard, whole)
        self.wait_writes()

    @guarded
    def wait_writes(self) -> None:
        """Wait for every write in flight.

        Raises:
            StoreError: A write failed; the remaining ones have been waited for.
        """
        wait_all([self._writes.wait, self._chunks.wait_writes])

    def _expect_free(self, shard: Shard) -> None:
        if self.is_fixed(shard.key):
            raise AssertionError(f"{shard.key} changes, and its master weights need it as it is")

    # -- letting go ------------------------------------------------------------------------------

    @guarded
    def let_go(self, shard: Shard, event: Event | None = None) -> None:
        """Let a shard go, if it is staged: at once, or once `event` has passed."""
        if not shard.is_staged:
            return
        self._staged.pop(shard, None)
        self._ahead.discard(shard)
        self._hand_over.take(shard.key, shard.numel)
        ticket, shard.read = shard.read, None
        try:
            if ticket is not None:
                ticket.wait()
        finally:
            self._memory.let_go(shard, event)
            self._changed[shard] = None

    @guarded
    def drop(self, shard: Shard) -> None:
        """Let a shard go and drop its kept slot, so that it is read again from the drive."""
        self.let_go(shard)
        self._memory.drop(shard)
        self._chunks.drop(shard)

    @guarded
    def drop_all(self) -> None:
        """Drop every shard; on return every slot is free, except for writes in flight.

        Call this before keys change in the store by another way than this stream.
        """
        for shard in tuple(self._staged):
            self.let_go(shard)
        self._memory.drop_all()
        self._chunks.drop()

    @guarded
    def recover(self, *, besides: Collection[Shard] = ()) -> list[Shard]:
        """Drop and return all shards but `besides`, in any state that Ctrl-C left."""
        lost = [shard for shard in self._shards if shard not in besides]
        for shard in lost:
            self._hand_over.take(shard.key, shard.numel)
        self._memory.recover(lost)
        for shard in lost:
            self._staged.pop(shard, None)
            self._ahead.discard(shard)
        self._changed.clear()
        self._chunks.drop()
        return lost

    # -- slots -----------------------------------------------------------------------------------

    def _read(self, shard: Shard) -> None:
        """Start reading a shard, unless its kept slot has it or the walk is still to write it."""
        if shard.state is ShardState.KEPT:
            self._memory.take(shard)
            self._note(shard, ShardState.RECALLED)
            return
        self._stage(shard, ShardState.DELAYED)
        try:
            if shard.tensor is not None and not self.background.has_passed(shard.key):
                self._hand_over.offer(shard.key, shard.tensor)
            self._start_delayed(shard)
        except BaseException:
            self.let_go(shard)
            raise

    def _start_delayed(self, shard: Shard) -> None:
        """Start the delayed read of a shard, if the walk has written its new value.

        Only the elements are read that the walk has not copied into the slot.
        """
        if shard.state is not ShardState.DELAYED or not self.background.has_passed(shard.key):
            return
        assert shard.lease is not None
        assert shard.tensor is not None
        count = self._hand_over.take(shard.key, shard.numel)
        self._chunks.wait(shard)
        shard.read = Ended()
        if count > 0:
            shard.read = self._store.read(
                key=shard.key,
                target=shard.tensor.narrow(0, 0, count),
                hold=shard.lease.hold(),
                capacity_bytes=shard.lease.slot_bytes if count == shard.numel else 0,
            )
        shard.become(ShardState.READING)

    def _wait(self, needed: Collection[Shard]) -> None:
        """Wait for the reads of these shards, and assemble those without a slot."""
        coming = [one for one in self._staged if one.is_coming]
        try:
            # Shards with a ticket first: the drive is reading them already.
            for shard in sorted(coming, key=lambda one: one.read is None):
                if shard not in needed:
                    continue
                if shard.read is None:
                    self.background.wait_for([shard.key])
                self._start_delayed(shard)
                ticket, shard.read = shard.read, None
                if ticket is not None:
                    ticket.wait()
                if shard.state is ShardState.DEFERRED:
                    self._chunks.read(shard)
                else:
                    shard.become(ShardState.ARRIVED)
                self._changed[shard] = None
        except BaseException:
            for shard in coming:
                with suppress(Exception):  # the first error is the one to raise
                    self.let_go(shard)
            raise

    def _stage(self, shard: Shard, state: ShardState) -> None:
        """Add an ABSENT shard to the staged ones, in a slot if there is one.

        Args:
            shard: The shard.
            state: DELAYED or CHANGED. Without a slot DELAYED becomes DEFERRED.
        """
        is_read, lease = state is ShardState.DELAYED, None
        if not (is_read and self._memory.offers(shard)):
            lease = self._memory.acquire(shard.nbytes, self._writes)
        self._note(shard, ShardState.DEFERRED if is_read and lease is None else state)
        if lease is not None:
            shard.lease, shard.tensor = lease, lease.view(shard.numel, shard.dtype)

    def _note(self, shard: Shard, state: ShardState) -> None:
        """Add a shard to the staged ones."""
        self._staged[shard] = None
        shard.become(state)
        self._changed[shard] = None

    def _make_room(self, shards: Iterable[Shard]) -> None:
        """Let go shards that were read ahead, furthest first, until these fit the budget."""
        needed_bytes = sum(self.pool.slot_bytes(one.nbytes) for one in shards)
        needed_bytes += self._staged_bytes()
        for shard in reversed([one for one in self._staged if one in self._ahead]):
            if needed_bytes <= self.pool.budget_bytes:
                return
            needed_bytes -= self.pool.slot_bytes(shard.nbytes)
            with suppress(StoreError):  # not needed now; the read that needs it raises the error
                self.let_go(shard)

    def _staged_bytes(self) -> int:
        return sum(self.pool.slot_bytes(one.nbytes) for one in self._staged)
