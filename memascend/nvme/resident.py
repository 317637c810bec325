"""The resident cache: keeps a fixed part of the store's keys in host memory instead of on SSD.

`ResidentStore` has the interface of `TensorStore` and stands in front of one from the start;
without a grant it only forwards calls. Once the plan has granted bytes to a stream, a key of that
stream may be in memory as a whole, or with its first pages (its head) and the rest on the drive. A
transfer over that border is split, and its ticket is that of the drive's part. A key that is partly
in memory, as a rule at most one per stream, has space for all of it reserved on the drive, so that
its head can be moved out without new space.

Policy: every tensor is used once per step, or once per pass, in a fixed cyclic order. An LRU cache
would always evict the tensor that is needed soonest. A fixed part saves most traffic per byte of
memory: the first keys get memory and keep it until they are discarded, or until the caller says
that another key needs it more (`give_memory_to`).

Knows keys, bytes and the store; the caller names the stream of a key. Keys without memory may be
used by any thread. Resident keys: one thread per key at a time. One thread creates and discards
them, while others may read other keys. Bytes are counted without a lock: if two threads read one
stream, some may not be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from memascend.base.interfaces import HostMemory, TensorIO, TensorRequest, Ticket
from memascend.base.units import page_up
from memascend.base.waiting import Ended
from memascend.memory.pool import Segment
from memascend.nvme.resident_keys import ResidentKey, find_run
from memascend.nvme.store import TensorStore

if TYPE_CHECKING:
    import torch

    from memascend import _core


class ResidentStore(TensorIO):
    """A store with a part of its keys in host memory. See the module's docstring.

    The store's rules hold, with two differences for a key with a part in memory: that part is
    copied before the call returns, and it can still be read after a failed write, since its bytes
    are known. Reads of the part on the drive raise until the key is written as a whole.
    """

    def __init__(self, store: TensorStore, *, stream_of: Callable[[str], str | None]) -> None:
        """Take no memory yet. The store is this object's own and has all keys without a stream."""
        self._store = store
        self._stream_of = stream_of
        self._blocks: dict[str, Segment] = {}
        self._entries: dict[str, ResidentKey] = {}
        self._bytes_read: dict[str, int] = {}
        self._bytes_written: dict[str, int] = {}

    @property
    def core(self) -> _core.Store:
        """The native store below; it knows only the keys on the drive."""
        return self._store.core

    # -- memory ----------------------------------------------------------------------------------

    @property
    def granted(self) -> dict[str, int]:
        """Bytes of memory by stream, in whole pages; streams without memory are left out."""
        return {stream: block.memory.numel() for stream, block in self._blocks.items()}

    def grant(self, nbytes: Mapping[str, int], *, memory: HostMemory, component: str) -> None:
        """Take whole pages for each stream, and move keys that are already on the drive into them.

        Nothing may be in flight on keys of these streams. An earlier grant is revoked.

        Raises:
            HostMemoryError: There is not enough memory.
            StoreError: A key could not be read; it and the later keys stay on the drive.
        """
        import torch

        self.revoke()
        for stream, count in nbytes.items():
            if count > 0:
                block = memory.tensor(page_up(count), torch.uint8, component=component)
                self._blocks[stream] = Segment(block)
                self._bytes_read[stream] = self._bytes_written[stream] = 0
        self._move_in()

    def revoke(self) -> None:
        """Move all resident keys to the drive and free all memory.

        Raises:
            StoreError: The drive failed or is full; keys not yet moved stay in memory.
            ValueError: A key is lent; nothing was moved.
        """
        for key, entry in self._entries.items():
            entry.refuse_if_lent(key)
        for key, entry in list(self._entries.items()):
            self._move_out(key, entry)
        self._blocks.clear()

    def give_memory_to(
        self, *, key: str, nbytes: int, over: str, before: Callable[[], object] = lambda: None
    ) -> None:
        """Give the memory of `over`, which is needed less, to a key that is about to be written.

        The old contents of `key` are discarded. `over` keeps its contents; it moves to the drive if
        the memory is too small for both. Does nothing if `over` has no memory, or no more of it
        than `key`. `before` is called before any change; after it the store must know of every
        transfer on both keys.

        Raises:
            StoreError: The drive failed.
        """
        entry, other = self._entries.get(key), self._entries.get(over)
        if other is None or (entry is not None and entry.head_bytes >= other.head_bytes):
            return
        other.refuse_if_lent(over)
        before()
        # Discard first, so that the drive never needs more room than before.
        self.discard(key=key)
        if self._blocks[other.stream].space.best(nbytes) is None:
            self._move_out(over, other)
        self.reserve(key=key, nbytes=nbytes)

    def lends(self, *, key: str, dtype: torch.dtype) -> bool:
        """Return whether a key is in memory as a whole, aligned for elements of this type."""
        entry = self._entries.get(key)
        return entry is not None and entry.holds(dtype)

    def lend(self, *, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a key that is in memory as a whole, for reading.

        Until `take_back` a write, move or discard of the key is a ValueError.
        """
        entry = self._entries[key]
        entry.is_lent = True
        self._bytes_read[entry.stream] += entry.nbytes
        return entry.head.view(dtype)

    def take_back(self, *, key: str) -> None:
        """End the loan of a key, if there is one."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_lent = False

    def trim(self) -> None:
        """Free the memory of streams that have no key in memory."""
        for stream, block in list(self._blocks.items()):
            if block.idle:
                del self._blocks[stream]

    # -- the store's surface ---------------------------------------------------------------------

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Reserve space, in memory as far as the key's stream has memory left."""
        entry = self._entries.get(key)
        if entry is not None and entry.nbytes == nbytes:
            return
        if entry is not None:
            entry.refuse_if_lent(key)
        block = self._block_of(key)
        # A key on the drive stays there: memory goes to the keys that come first.
        if block is None or (entry is None and self._store.contains(key=key)):
            self._store.reserve(key=key, nbytes=nbytes)
            return
        place = find_run(block.space, nbytes, None if entry is None else entry.run)
        # The drive first: if it refuses, nothing has changed.
        if place is None or place[1] < nbytes:
            self._store.reserve(key=key, nbytes=nbytes)
        elif entry is not None and entry.is_on_drive:
            self._store.discard(key=key)
        if entry is not None:
            self._forget(key, entry)
        if place is not None:
            self._entries[key] = self._allot(key, nbytes, place)

    def start_write(self, request: TensorRequest) -> Ticket:
        """Start a write; the part in memory is copied on return."""
        key = request.key
        if request.offset_bytes is None and self._blocks:
            self.reserve(key=key, nbytes=request.nbytes)
        entry = self._entries.get(key)
        if entry is None:
            return self._store.start_write(request)
        entry.refuse_if_lent(key)
        ticket: Ticket = Ended()
        begin, count = request.begin, entry.head_bytes
        # The drive first: if it refuses, nothing has changed.
        if request.offset_bytes is not None:
            count = entry.count_in_head(key, begin, request.nbytes)
            if count < request.nbytes:
                ticket = self._store.start_write(request.without(count))
        elif entry.is_on_drive:
            # With the head: after a failed write only a write of the whole key makes it valid.
            ticket = self._store.start_write(request)
        if count:
            entry.head[begin : begin + count].copy_(request.data[:count])
            self._bytes_written[entry.stream] += count
        return ticket

    def start_read(self, request: TensorRequest) -> Ticket:
        """Start a read; the part from memory is copied on return."""
        entry = self._entries.get(request.key)
        if entry is None:
            return self._store.start_read(request)
        ticket: Ticket = Ended()
        begin = request.begin
        count = entry.count_in_head(request.key, begin, request.nbytes)
        if count < request.nbytes:
            ticket = self._store.start_read(request.without(count))
        if count:
            import torch

            with torch.inference_mode():  # the target may be from there: an evaluation's
                request.data[:count].copy_(entry.head[begin : begin + count])
            self._bytes_read[entry.stream] += count
        return ticket

    def discard(self, *, key: str) -> bool:
        """Remove a key once its I/O has finished, and free its memory; False if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return self._store.discard(key=key)
        entry.refuse_if_lent(key)
        if entry.is_on_drive:
            self._store.discard(key=key)
        self._forget(key, entry)
        return True

    def shrink(self) -> None:
        """Give the space that no key has back to the file systems."""
        self._store.shrink()

    def wait_all(self) -> None:
        """Return when nothing is in flight; tickets keep their errors."""
        self._store.wait_all()

    def take_over(self, *, key: str, other: str) -> None:
        """Move the contents of `other`, a key of the same size, into `key`.

        Afterwards the contents of `other` are undefined. `other` must have no part in memory.
        """
        entry = self._entries.get(key)
        if entry is not None:
            entry.refuse_if_lent(key)
        if entry is None or entry.is_on_drive:
            self._store.exchange(key=key, other=other)
        if entry is not None:
            self._store.read(key=key if entry.is_on_drive else other, target=entry.head).wait()

    def memory_of(self, *, key: str) -> int:
        """Return how many bytes of a key are in memory."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.head_bytes

    def contains(self, *, key: str) -> bool:
        """Return whether the key is reserved or written, in memory or on the drive."""
        return key in self._entries or self._store.contains(key=key)

    def nbytes(self, *, key: str) -> int:
        """Return the size of a key, including its part in memory."""
        entry = self._entries.get(key)
        return self._store.nbytes(key=key) if entry is None else entry.nbytes

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted({*self._store.keys(), *self._entries})

    def stats(self) -> dict[str, int | float]:
        """Return the drive's counters, and the bytes served from memory."""
        counters = self._store.stats()
        for verb, by_stream in (("read", self._bytes_read), ("written", self._bytes_written)):
            counters[f"resident_bytes_{verb}"] = sum(by_stream.values())
            for stream, count in by_stream.items():
                counters[f"resident_bytes_{verb}.{stream}"] = count
        return counters

    def close(self) -> None:
        """Wait for everything in flight, then free space and memory."""
        self._store.close()
        self._entries.clear()
        self._blocks.clear()

    # -- inner -----------------------------------------------------------------------------------

    def _block_of(self, key: str) -> Segment | None:
        if not self._blocks:
            return None
        stream = self._stream_of(key)
        return None if stream is None else self._blocks.get(stream)

    def _allot(self, key: str, nbytes: int, place: tuple[int, int]) -> ResidentKey:
        """Take a free place in the block of a key's stream, for the key or its head."""
        stream, (begin, count) = self._stream_of(key), place
        assert stream is not None
        block = self._blocks[stream]
        run = block.space.take(begin=begin, nbytes=count)
        return ResidentKey(stream, nbytes, run, block.memory[begin : begin + count])

    def _move_in(self) -> None:
        """Read the heads of keys on the drive; keys that fit as a whole leave the drive."""
        moving: list[tuple[str, ResidentKey, Ticket]] = []
        try:
            for key in self._store.keys():  # noqa: SIM118  a store is no dict
                block, nbytes = self._block_of(key), self._store.nbytes(key=key)
                place = None if block is None else find_run(block.space, nbytes)
                if place is not None:
                    entry = self._allot(key, nbytes, place)
                    ticket = self._store.read(key=key, target=entry.head, hold=entry.run)
                    moving.append((key, entry, ticket))
            while moving:
                key, entry, ticket = moving[0]
                ticket.wait()
                if not entry.is_on_drive:
                    self._store.discard(key=key)
                self._entries[key] = entry
                del moving[0]
        except BaseException:
            for _, entry, ticket in moving:
                with suppress(Exception):  # the first error is raised below
                    ticket.wait()
                entry.run.release()
            raise

    def _move_out(self, key: str, entry: ResidentKey) -> None:
        """Write the head to the drive and free its memory."""
        begin = 0 if entry.is_on_drive else None
        self._store.write(key=key, source=entry.head, offset_bytes=begin).wait()
        self._forget(key, entry)

    def _forget(self, key: str, entry: ResidentKey) -> None:
        del self._entries[key]
        entry.run.release()
