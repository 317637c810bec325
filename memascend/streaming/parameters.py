"""The parameter path between drive and host: a shard is staged in a slot, moved, let go.

Knows torch, the pool and the store; never DeepSpeed. A shard holds a slot only while it travels:
the slot goes back as soon as the copy to the device has passed (an event says so where copies are
asynchronous), not when the device copy is released. One thread at a time may call.

Who may still touch a slot is settled below this file: the slot is free again only when the lease
was released and the store has reaped every transfer on it.

With a budget, host memory is bounded whatever the model is. A shard too large for a slot is
assembled in device memory, chunk by chunk through the staging slots, and so is one that finds no
room. Which keys are staged never depends on time or on where they found room, only on the calls:
DeepSpeed decides by it what to gather, and every rank must decide alike. A slot whose shard was let
go keeps its bytes until another shard needs the room; a read of the same key then takes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

import torch

from memascend.base.interfaces import Event, Lease, SlotPool, TensorIO, Ticket
from memascend.errors import StoreError
from memascend.streaming.budget import Budget, derive_prefetch_bytes
from memascend.streaming.kept_slots import ReturningSlots, Staged
from memascend.streaming.staging import StagingSlots

#: Casts of updated parameters that may wait for the drive; bounds the slots that writing back
#: takes.
WRITE_BACK_COUNT_MAX = 4
#: The same with a budget, which bounds their bytes: tiny shards must not wait for one another.
WRITE_BACK_COUNT_MAX_IN_BUDGET = 64


class ParameterStream:
    """Stages shards by key. See the module's head for the life of a slot."""

    def __init__(
        self,
        *,
        store: TensorIO,
        pool: SlotPool,
        prefetch_bytes: int | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Takes no slot yet.

        Args:
            store: Where shards are.
            pool: Where they are staged.
            prefetch_bytes: What may be read ahead; None derives it from the sizes that occur.
            budget: Bounds host memory; None lets the pool grow with the model.
        """
        self._store = store
        self._pool = pool
        self._prefetch_bytes = prefetch_bytes
        self.budget = budget
        self._staged: dict[str, Staged] = {}
        self._reading: dict[str, Staged] = {}
        self._ahead: dict[str, None] = {}  # read ahead and not needed yet; last needed last
        self._returning = ReturningSlots()
        self._writes: deque[Ticket] = deque()
        self._nbytes_of: dict[str, int] = {}
        self._derived: tuple[int, int] = (-1, 0)  # for how many keys, prefetch bytes
        self._in_chunks: set[str] = set()  # keys that staging slots may still have writes of
        # Not torch.empty later: zero.Init replaces it by one that casts.
        self._on_device = None if budget is None else torch.empty(0, device=budget.device)

    # -- what is where ---------------------------------------------------------------------------

    def is_staged(self, key: str) -> bool:
        """Whether the key is staged (its contents may still be on the way)."""
        return key in self._staged

    def is_in_slot(self, key: str) -> bool:
        """Whether the key is staged in a slot, whose bytes are another's once it is dropped."""
        return key in self._staged and self._staged[key].lease is not None

    def staged_tensor(self, key: str) -> torch.Tensor:
        """The view of a staged key: of a slot, or a device tensor."""
        tensor = self._staged[key].tensor
        if tensor is None:
            raise AssertionError(f"{key} was not waited for")
        return tensor

    def staged_keys(self) -> tuple[str, ...]:
        """Keys that are staged now."""
        return tuple(self._staged)

    # -- drive -> host or device -----------------------------------------------------------------

    def read(self, key: str, numel: int, dtype: torch.dtype, *, ahead: bool = False) -> None:
        """Starts reading a key; `wait_reads` gives its tensor.

        Args:
            key: The shard.
            numel: Its elements.
            dtype: Their type.
            ahead: It is not needed yet, and may be let go by `make_room`.
        """
        kept = self._returning.take(key)
        staged = self._stage(key, numel, dtype, kept)
        if ahead:
            self._ahead[key] = None
        try:
            if kept is None and staged.lease is not None and staged.tensor is not None:
                self._wait_chunks(key)
                hold = staged.lease.hold()
                staged.read = self._store.read(key=key, target=staged.tensor, hold=hold)
        except BaseException:
            self.drop(key)
            raise
        self._reading[key] = staged

    def wait_reads(self, keys: Collection[str] | None = None) -> list[str]:
        """Waits for the given reads in flight, or for every one, and gives the keys that arrived.

        Raises:
            StoreError: A read failed; its key is let go, later ones are still on their way.
        """
        arrived: list[str] = []
        wanted = [key for key in self._reading if keys is None or key in keys]
        # Those with a ticket first: meanwhile the drive is busy with them anyway.
        for key in sorted(wanted, key=lambda key: self._reading[key].read is None):
            staged = self._reading.pop(key)
            ticket, staged.read = staged.read, None
            try:
                if ticket is not None:
                    ticket.wait()
                elif staged.tensor is None:
                    staged.tensor = self._assemble(staged)
            except BaseException:
                self.drop(key)
                raise
            staged.equals_store = True
            arrived.append(key)
        return arrived

    def claim(self, keys: Iterable[str]) -> None:
        """The keys are needed now: `make_room` no longer lets them go."""
        for key in keys:
            self._ahead.pop(key, None)

    def make_room(self, sizes: Iterable[int]) -> list[str]:
        """Lets go what was read ahead, furthest first, until shards of these sizes fit the budget.

        Returns:
            The keys that were let go.
        """
        if self.budget is None:
            return []
        needed_bytes = sum(map(self.budget.slot_bytes, sizes)) + self._staged_bytes()
        gone: list[str] = []
        for key in reversed(tuple(self._ahead)):
            if needed_bytes <= self.budget.nbytes:
                break
            needed_bytes -= self.budget.slot_bytes(self._staged[key].nbytes)
            gone.append(key)
            with suppress(StoreError):  # nobody needs it now; who does will be told
                self.drop(key)
        return gone

    def read_into(self, key: str, target: torch.Tensor) -> None:
        """Fills a flat tensor that is not a slot: of any device, at any address, of any length."""
        if self.budget is not None and target.device.type != "cpu":
            self.budget.staging.read(key=key, target=target)
        else:
            self._wait_chunks(key)
            self._store.read(key=key, target=target).wait()

    def admit_prefetch(self, wanted: Sequence[tuple[str, int]]) -> Iterator[str]:
        """Gives those of the wanted (key, nbytes), in order, that may be read ahead now.

        Stops at the first that does not fit, so that what is needed soonest is never overtaken. One
        that has no slot ever is passed over: it is read when it is needed.
        """
        room_bytes = self._prefetch_limit_bytes() - self._staged_bytes()
        for key, nbytes in wanted:
            cost_bytes = nbytes
            if self.budget is not None:
                cost_bytes = self.budget.slot_bytes(nbytes)
                if cost_bytes == 0:
                    continue
            if cost_bytes > room_bytes:
                return
            room_bytes -= cost_bytes
            yield key

    # -- host -> drive ---------------------------------------------------------------------------

    def stage(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Gives a slot to be filled by the caller and then stored with `write`.

        None when the budget has no slot for it: then the caller keeps the shard on the device and
        stores it with `write_from`.
        """
        tensor = self._stage(key, numel, dtype).tensor
        if tensor is None:
            self.drop(key)
        return tensor

    def write(self, key: str) -> None:
        """Stores a staged key and lets it go. On return the bytes are in the store."""
        staged = self._staged[key]
        staged.equals_store = False
        try:
            if staged.lease is None:
                self.write_from(key, self.staged_tensor(key))
            else:
                self._wait_chunks(key)
                hold = staged.lease.hold()
                self._store.write(key=key, source=self.staged_tensor(key), hold=hold).wait()
        finally:
            self.drop(key)

    def write_from(self, key: str, source: torch.Tensor) -> None:
        """Stores a flat tensor of any device, chunk by chunk; on return it is in the store."""
        self.forget(key)
        self._write_chunks(key, source, source.dtype)
        self._wait_chunks(key)

    def write_cast(self, key: str, source: torch.Tensor, dtype: torch.dtype) -> None:
        """Casts `source` on its way and starts storing it; `source` may be reused on return."""
        count_max = WRITE_BACK_COUNT_MAX if self.budget is None else WRITE_BACK_COUNT_MAX_IN_BUDGET
        while len(self._writes) >= count_max:
            self._writes.popleft().wait()
        staged = self._stage(key, source.numel(), dtype)
        try:
            if staged.lease is None or staged.tensor is None:
                self._write_chunks(key, source, dtype)
            else:
                self._wait_chunks(key)
                staged.tensor.copy_(source)
                hold = staged.lease.hold()
                self._writes.append(self._store.write(key=key, source=staged.tensor, hold=hold))
        finally:
            self.drop(key)

    def wait_writes(self) -> None:
        """Waits for every write in flight.

        Raises:
            StoreError: A write failed; the remaining ones have been waited for.
        """
        first_error: BaseException | None = None
        while self._writes:
            try:
                self._writes.popleft().wait()
            except Exception as error:
                first_error = first_error or error
        if self.budget is not None:
            self._in_chunks.clear()
            try:
                self._staging.wait_writes()
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    # -- letting go ------------------------------------------------------------------------------

    def drop(self, key: str, event: Event | None = None) -> None:
        """Lets a key go: at once, or once `event` has passed. Unknown keys are ignored."""
        self._ahead.pop(key, None)
        staged = self._staged.pop(key, None)
        if staged is None:
            return
        in_flight = self._reading.pop(key, None)
        try:
            if in_flight is not None and in_flight.read is not None:
                in_flight.read.wait()
        finally:
            # Device memory has its own order of use; a slot must wait for the copy.
            if staged.lease is not None:
                staged.copied = event or staged.copied
                self._returning.put(staged, keeps=self.budget is not None)

    def forget(self, key: str) -> None:
        """Drops a key, and has it read from the drive when it is needed again."""
        self.drop(key)
        self._returning.forget(key)

    def forget_all(self) -> None:
        """Drops and forgets every key; on return every slot is free but for writes.

        For whoever is about to change keys in the store by another way than this stream.
        """
        for key in self.staged_keys():
            self.drop(key)
        self._returning.drain()

    # -- slots -----------------------------------------------------------------------------------

    def _stage(
        self, key: str, numel: int, dtype: torch.dtype, kept: Staged | None = None
    ) -> Staged:
        if key in self._staged:
            raise AssertionError(f"{key} is staged already")
        if kept is None:
            self.forget(key)
        staged = kept or Staged(key, numel, dtype, None, None)
        self._nbytes_of[key] = staged.nbytes
        lease = self._acquire(staged.nbytes) if kept is None else None
        if lease is not None:
            staged.lease, staged.tensor = lease, self._pool.view(lease, numel, dtype)
        self._staged[key] = staged
        return staged

    def _acquire(self, nbytes: int) -> Lease | None:
        """A free slot, else one that is about to become free, else a new one where that is allowed.

        None when only the caller could make room: then the shard does without a slot.
        """
        if self.budget is not None and self.budget.slot_bytes(nbytes) == 0:
            return None
        while True:
            self._release_passed()
            lease = self._pool.acquire(nbytes)
            if lease is not None:
                return lease
            if self._returning.free_oldest():
                continue
            if not self._wait_for_one(nbytes):
                if self.budget is not None:
                    return None
                self._pool.grow(nbytes)

    def _release_passed(self) -> None:
        self._returning.free_passed()
        while self._writes and self._writes[0].done():
            self._writes.popleft().wait()

    def _wait_for_one(self, nbytes: int) -> bool:
        """Waits for the oldest copy or write that holds such a slot; False when there is none."""
        if self._returning.wait_for_one(nbytes if self.budget is None else None):
            return True
        if self._writes:
            self._writes.popleft().wait()
            return True
        return False

    # -- without a slot --------------------------------------------------------------------------

    @property
    def _staging(self) -> StagingSlots:
        if self.budget is None:
            raise AssertionError("only a budget leaves a shard without a slot")
        return self.budget.staging

    def _assemble(self, staged: Staged) -> torch.Tensor:
        if self._on_device is None:
            raise AssertionError("only a budget leaves a shard without a slot")
        tensor = self._on_device.new_empty(staged.numel, dtype=staged.dtype)
        self._staging.read(key=staged.key, target=tensor)
        return tensor

    def _wait_chunks(self, key: str) -> None:
        """Before a key moves through a slot: the store may not know yet of its chunks."""
        if key in self._in_chunks:
            self._in_chunks.clear()
            self._staging.wait_writes()

    def _write_chunks(self, key: str, source: torch.Tensor, dtype: torch.dtype) -> None:
        self._in_chunks.add(key)
        self._staging.store.reserve(key=key, nbytes=source.numel() * dtype.itemsize)
        self._staging.write(key=key, source=source, dtype=dtype)

    # -- reading ahead ---------------------------------------------------------------------------

    def _staged_bytes(self) -> int:
        staged = self._staged.values()
        if self.budget is None:
            return sum(one.nbytes for one in staged)
        return sum(self.budget.slot_bytes(one.nbytes) for one in staged)

    def _prefetch_limit_bytes(self) -> int:
        limit_bytes = self._prefetch_bytes
        if limit_bytes is None:
            if self._derived[0] != len(self._nbytes_of):
                derived = derive_prefetch_bytes(self._nbytes_of.values())
                self._derived = len(self._nbytes_of), derived
            limit_bytes = self._derived[1]
        return limit_bytes if self.budget is None else min(limit_bytes, self.budget.share_bytes)
