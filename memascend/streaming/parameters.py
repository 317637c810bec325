"""The parameter path between drive and host: a shard is staged in a slot, moved, let go.

Knows torch, the pool and the store; never DeepSpeed. A shard holds a slot only while it travels:
the slot goes back as soon as the copy to the device has passed (an event says so where copies are
asynchronous), not when the device copy is released. One thread at a time may call.

Who may still touch a slot is settled below this file: the slot is free again only when the lease
was released and the store has reaped every transfer on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from memascend.tensors import Event, Lease, SlotPool, TensorIO, Ticket

#: Read ahead at least this much, so that small models are not read tensor by tensor.
PREFETCH_BYTES_MIN = 32 << 20
#: Casts of updated parameters that may wait for the drive; bounds the slots that writing back
#: takes.
WRITE_BACK_COUNT_MAX = 4


@dataclass(slots=True)
class Staged:
    """One shard in a slot. `read` is its transfer from the drive while that is in flight."""

    key: str
    lease: Lease
    tensor: torch.Tensor
    read: Ticket | None = None


class ParameterStream:
    """Stages shards by key. See the module's head for the life of a slot."""

    def __init__(
        self, *, store: TensorIO, pool: SlotPool, prefetch_bytes: int | None = None
    ) -> None:
        self._store = store
        self._pool = pool
        self._prefetch_bytes = prefetch_bytes
        self._staged: dict[str, Staged] = {}
        self._reading: dict[str, Staged] = {}
        self._retired: deque[tuple[Event, Staged]] = deque()
        self._writes: deque[Ticket] = deque()
        self._nbytes_of: dict[str, int] = {}

    # -- what is where ---------------------------------------------------------------------------

    def is_staged(self, key: str) -> bool:
        """Whether the key holds a slot (its contents may still be on the way)."""
        return key in self._staged

    def staged_tensor(self, key: str) -> torch.Tensor:
        """The view of a staged key."""
        return self._staged[key].tensor

    def staged_keys(self) -> tuple[str, ...]:
        """Keys that hold a slot now."""
        return tuple(self._staged)

    # -- drive -> host ---------------------------------------------------------------------------

    def read(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Starts reading a key into a slot; the view is filled once `wait_reads` has returned."""
        staged = self._stage(key, numel, dtype)
        try:
            staged.read = self._store.read(key=key, target=staged.tensor, hold=staged.lease.hold())
        except BaseException:
            self.drop(key)
            raise
        self._reading[key] = staged
        return staged.tensor

    def wait_reads(self) -> list[str]:
        """Waits for every read in flight and gives the keys that arrived.

        Raises:
            StoreError: A read failed; its key is let go, later ones are still on their way.
        """
        arrived: list[str] = []
        while self._reading:
            key, staged = next(iter(self._reading.items()))
            del self._reading[key]
            ticket, staged.read = staged.read, None
            try:
                if ticket is not None:
                    ticket.wait()
            except BaseException:
                self.drop(key)
                raise
            arrived.append(key)
        return arrived

    def read_into(self, key: str, target: torch.Tensor) -> None:
        """Fills a tensor that is not a slot; any address, any length."""
        self._store.read(key=key, target=target).wait()

    def admit_prefetch(self, wanted: Sequence[tuple[str, int]]) -> Iterator[str]:
        """Gives those of the wanted (key, nbytes), in order, that may be read ahead now.

        Stops at the first that does not fit, so that what is needed soonest is never overtaken.
        """
        room_bytes = self._prefetch_limit_bytes() - sum(
            staged.tensor.nbytes for staged in self._staged.values()
        )
        for key, nbytes in wanted:
            if nbytes > room_bytes:
                return
            room_bytes -= nbytes
            yield key

    # -- host -> drive ---------------------------------------------------------------------------

    def stage(self, key: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Gives a slot to be filled by the caller and then stored with `write`."""
        return self._stage(key, numel, dtype).tensor

    def write(self, key: str) -> None:
        """Stores a staged key and lets it go. On return the bytes are in the store."""
        staged = self._staged[key]
        try:
            self._store.write(key=key, source=staged.tensor, hold=staged.lease.hold()).wait()
        finally:
            self.drop(key)

    def write_cast(self, key: str, source: torch.Tensor, dtype: torch.dtype) -> None:
        """Casts `source` into a slot and starts storing it; `source` may be reused on return."""
        while len(self._writes) >= WRITE_BACK_COUNT_MAX:
            self._writes.popleft().wait()
        staged = self._stage(key, source.numel(), dtype)
        try:
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
        if first_error is not None:
            raise first_error

    # -- letting go ------------------------------------------------------------------------------

    def drop(self, key: str, event: Event | None = None) -> None:
        """Lets a key go: at once, or once `event` has passed. Unknown keys are ignored."""
        staged = self._staged.pop(key, None)
        if staged is None:
            return
        in_flight = self._reading.pop(key, None)
        try:
            if in_flight is not None and in_flight.read is not None:
                in_flight.read.wait()
        finally:
            if event is None:
                staged.lease.release()
            else:
                self._retired.append((event, staged))

    # -- slots -----------------------------------------------------------------------------------

    def _stage(self, key: str, numel: int, dtype: torch.dtype) -> Staged:
        if key in self._staged:
            raise AssertionError(f"{key} is staged already")
        nbytes = numel * dtype.itemsize
        self._nbytes_of[key] = nbytes
        lease = self._acquire(nbytes)
        staged = Staged(key, lease, self._pool.view(lease, numel, dtype))
        self._staged[key] = staged
        return staged

    def _acquire(self, nbytes: int) -> Lease:
        """A free slot, else one that is about to become free, else a new one."""
        while True:
            self._release_passed()
            lease = self._pool.acquire(nbytes)
            if lease is not None:
                return lease
            if not self._wait_for_one(nbytes):
                self._pool.grow(nbytes)

    def _release_passed(self) -> None:
        while self._retired and self._retired[0][0].query():
            self._retired.popleft()[1].lease.release()
        while self._writes and self._writes[0].done():
            self._writes.popleft().wait()

    def _wait_for_one(self, nbytes: int) -> bool:
        """Waits for the oldest copy or write that holds such a slot; False when there is none."""
        if any(nbytes <= staged.lease.slot_bytes < 2 * nbytes for _, staged in self._retired):
            event, staged = self._retired.popleft()
            event.synchronize()
            staged.lease.release()
            return True
        if self._writes:
            self._writes.popleft().wait()
            return True
        return False

    def _prefetch_limit_bytes(self) -> int:
        if self._prefetch_bytes is not None:
            return self._prefetch_bytes
        return derive_prefetch_bytes(self._nbytes_of.values())


def derive_prefetch_bytes(sizes: Iterable[int]) -> int:
    """Two of the largest tensor that occurs three times: the layers', not the embedding's."""
    counts = Counter(sizes)
    repeated = [nbytes for nbytes, count in counts.items() if count >= 3]
    return max(PREFETCH_BYTES_MIN, 2 * max(repeated, default=0))
