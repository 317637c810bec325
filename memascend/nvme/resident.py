"""The resident cache: a fixed part of what the store keeps stays in host memory instead.

`ResidentStore` stands in front of a `TensorStore`, with the same surface, from the start; without a
grant it only passes calls on. Once a plan has granted bytes to a stream, a key of that stream may
lie in memory whole, or with its first pages, and on the drive from there on. A transfer over the
border is split, and its ticket stands for both parts. Space on the drive is reserved for all of a
key that lies there in part, at most one of each stream as a rule, so that it can move without help.

Policy: every tensor is touched once a step, or once a pass, in a fixed cyclic order. Replacement by
recency would always give up what is needed soonest. What serves most bytes per byte of memory is a
part that never moves: the first keys that come get memory, and keep it until they are discarded, or
until whoever uses them says that another is needed more (`give_memory_to`).

Knows keys, bytes and the store; the caller names the stream of a key. Keys without memory may be
used by any thread. Of the others each may be used by one thread at a time; one thread alone makes
and discards them, which nobody notices who reads another one. Bytes are counted without a lock:
where two threads read one stream some may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from memascend.base.interfaces import HostMemory, Ticket
from memascend.base.units import page_up
from memascend.base.waiting import Ended
from memascend.memory.pool import Segment
from memascend.nvme.resident_keys import ResidentKey, take_run
from memascend.nvme.store import TensorStore, contiguous_cpu

if TYPE_CHECKING:
    import torch

    from memascend import _core


class ResidentStore:
    """A store of which a part is in host memory. See the module's head.

    The store's rules hold. Two things differ where a key has a part in memory: copies to and from
    it are made before the call returns, and after a failed write that part is still read, since
    its bytes are known; reads of the part on the drive raise until the key is written as a whole.
    """

    def __init__(self, store: TensorStore, *, stream_of: Callable[[str], str | None]) -> None:
        """Take no memory yet.

        Args:
            store: What holds everything else. Belongs to this object.
            stream_of: The stream of a key, None for a key that never stays in memory.
        """
        self._store = store
        self._stream_of = stream_of
        self._blocks: dict[str, Segment] = {}
        self._entries: dict[str, ResidentKey] = {}
        self._bytes_read: dict[str, int] = {}
        self._bytes_written: dict[str, int] = {}

    @property
    def core(self) -> _core.Store:
        """The store below; it knows only what is on the drive."""
        return self._store.core

    # -- memory ----------------------------------------------------------------------------------

    @property
    def granted(self) -> dict[str, int]:
        """Bytes of memory that each stream has, in whole pages; streams without are left out."""
        return {stream: block.memory.numel() for stream, block in self._blocks.items()}

    def grant(self, nbytes: Mapping[str, int], *, memory: HostMemory, component: str) -> None:
        """Take memory for each stream, and move keys that are on the drive already into it.

        Nothing may be in flight on keys of these streams. What an earlier grant gave is revoked.

        Args:
            nbytes: Of each stream, rounded up to whole pages.
            memory: Where one block per stream comes from.
            component: Name in the ledger.

        Raises:
            HostMemoryError: There is not enough memory.
            StoreError: A key could not be read; it and those after it stay on the drive.
        """
        import torch

        self.revoke()
        for stream, count in nbytes.items():
            if count > 0:
                block = memory.tensor(page_up(count), torch.uint8, component=component)
                self._blocks[stream] = Segment(block, [(0, block.numel())])
                self._bytes_read[stream] = self._bytes_written[stream] = 0
        self._move_in()

    def revoke(self) -> None:
        """Move everything to the drive and give all memory back.

        Raises:
            StoreError: The drive failed or is full; what has not been moved stays where it is.
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
        """Give a key that is about to be written the memory of one that is needed less from now.

        What `key` held is given up. `over` keeps its contents, on the drive if there is no memory
        for both; where it has none nothing happens. Else `before` is called first: nothing may be
        on its way to either key that the store does not know of.

        Raises:
            StoreError: The drive failed.
        """
        entry, other = self._entries.get(key), self._entries.get(over)
        if other is None or (entry is not None and entry.head_bytes >= other.head_bytes):
            return
        other.refuse_if_lent(over)
        before()
        # First, so that the drive never needs room for more than it had.
        self.discard(key=key)
        free = self._blocks[other.stream].free
        if not any(end - begin >= nbytes for begin, end in free):
            self._move_out(over, other)
        self.reserve(key=key, nbytes=nbytes)

    def lends(self, *, key: str, dtype: torch.dtype) -> bool:
        """Return whether all of a key is in memory, where elements of this type may be."""
        entry = self._entries.get(key)
        return entry is not None and entry.holds(dtype)

    def lend(self, *, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory itself of a key that is all in it, to be read.

        Until it is taken back nothing may write, move or discard the key: each is a ValueError.
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
        """Return back the memory of streams that have no key in it."""
        for stream, block in list(self._blocks.items()):
            if block.idle:
                del self._blocks[stream]

    # -- the store's surface ---------------------------------------------------------------------

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Do as TensorStore.reserve, in memory as far as there is any left for the key.

        Raises:
            StoreFullError: There is not enough; nothing was changed.
        """
        entry = self._entries.get(key)
        if entry is not None and entry.nbytes == nbytes:
            return
        if entry is not None:
            entry.refuse_if_lent(key)
        block = self._block_of(key)
        # What is on the drive stays there: memory is for the keys that come first.
        if block is None or (entry is None and self._store.contains(key=key)):
            self._store.reserve(key=key, nbytes=nbytes)
            return
        free = list(block.free)
        try:
            if entry is not None:
                block.put(entry.begin, entry.begin + entry.head_bytes)
            made = self._allot(key, nbytes)
            if made is None or made.is_on_drive:
                self._store.reserve(key=key, nbytes=nbytes)
            elif entry is not None and entry.is_on_drive:
                self._store.discard(key=key)
        except BaseException:
            block.free = free
            raise
        self._entries.pop(key, None)
        if made is not None:
            self._entries[key] = made

    def write(
        self,
        *,
        key: str,
        source: torch.Tensor,
        offset_bytes: int | None = None,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Do as TensorStore.write; what goes into memory is there on return.

        Raises:
            StoreFullError: No room for the key.
            ValueError: Not a contiguous CPU tensor, or outside the key.
        """
        if offset_bytes is None and self._blocks:
            self.reserve(key=key, nbytes=contiguous_cpu(source).nbytes)
        entry = self._entries.get(key)
        if entry is None:
            return self._store.write(
                key=key,
                source=source,
                offset_bytes=offset_bytes,
                hold=hold,
                capacity_bytes=capacity_bytes,
            )
        entry.refuse_if_lent(key)
        ticket: Ticket = Ended()
        data = _as_bytes(source)
        offset, count = offset_bytes or 0, entry.head_bytes
        # The drive first: when it refuses, nothing has changed.
        if offset_bytes is not None:
            count = entry.count_in_head(key, offset, data.numel())
            if count < data.numel():
                ticket = self._store.write(
                    key=key,
                    source=data[count:],
                    offset_bytes=offset + count,
                    hold=(source, hold),
                )
        elif entry.is_on_drive:
            # The head too: only as a whole is a key sound again after a failed write.
            ticket = self._store.write(key=key, source=source, hold=hold)
        if count:
            entry.head[offset : offset + count].copy_(data[:count])
            self._bytes_written[entry.stream] += count
        return ticket

    def read(
        self,
        *,
        key: str,
        target: torch.Tensor,
        offset_bytes: int = 0,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Do as TensorStore.read; what comes from memory is there on return.

        Raises:
            StoreError: No such key, or an earlier write of it failed.
            ValueError: Not a contiguous CPU tensor, or outside the key.
        """
        entry = self._entries.get(key)
        if entry is None:
            return self._store.read(
                key=key,
                target=target,
                offset_bytes=offset_bytes,
                hold=hold,
                capacity_bytes=capacity_bytes,
            )
        ticket: Ticket = Ended()
        data = _as_bytes(target)
        count = entry.count_in_head(key, offset_bytes, data.numel())
        if count < data.numel():
            ticket = self._store.read(
                key=key,
                target=data[count:],
                offset_bytes=offset_bytes + count,
                hold=(target, hold),
            )
        if count:
            data[:count].copy_(entry.head[offset_bytes : offset_bytes + count])
            self._bytes_read[entry.stream] += count
        return ticket

    def discard(self, *, key: str) -> bool:
        """Forget a key once its I/O is over; its memory is for the next. False without one."""
        entry = self._entries.get(key)
        if entry is None:
            return self._store.discard(key=key)
        entry.refuse_if_lent(key)
        if entry.is_on_drive:
            self._store.discard(key=key)
        self._forget(key, entry)
        return True

    def wait_all(self) -> None:
        """Return when nothing is in flight; tickets keep their errors."""
        self._store.wait_all()

    def take_over(self, *, key: str, other: str) -> None:
        """Give a key what another one of its size holds, whose contents are undefined then.

        Memory is for the key; the other one must have none.

        Raises:
            StoreError: The drive failed.
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
        """Check that the key is reserved or written, wherever it lies."""
        return key in self._entries or self._store.contains(key=key)

    def nbytes(self, *, key: str) -> int:
        """Return the size of a key, both parts together."""
        entry = self._entries.get(key)
        return self._store.nbytes(key=key) if entry is None else entry.nbytes

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted({*self._store.keys(), *self._entries})

    def stats(self) -> dict[str, int | float]:
        """Return the drive's counters, and the bytes that memory served instead."""
        counters = self._store.stats()
        for verb, by_stream in (("read", self._bytes_read), ("written", self._bytes_written)):
            counters[f"resident_bytes_{verb}"] = sum(by_stream.values())
            for stream, count in by_stream.items():
                counters[f"resident_bytes_{verb}.{stream}"] = count
        return counters

    def close(self) -> None:
        """Wait for everything in flight and give space and memory back."""
        self._store.close()
        self._entries.clear()
        self._blocks.clear()

    # -- inner -----------------------------------------------------------------------------------

    def _block_of(self, key: str) -> Segment | None:
        if not self._blocks:
            return None
        stream = self._stream_of(key)
        return None if stream is None else self._blocks.get(stream)

    def _allot(self, key: str, nbytes: int) -> ResidentKey | None:
        """Take memory for a key or its head, not known under its name yet; None without any."""
        stream, block = self._stream_of(key), self._block_of(key)
        run = take_run(block, nbytes) if block is not None and nbytes > 0 else None
        if stream is None or block is None or run is None:
            return None
        begin, end = run
        return ResidentKey(stream, nbytes, begin, block.memory[begin:end])

    def _move_in(self) -> None:
        """Read the heads of keys that are on the drive; those that fit whole leave it."""
        moving: list[tuple[str, ResidentKey, Ticket]] = []
        try:
            for key in self._store.keys():  # noqa: SIM118  a store is no dict
                entry = self._allot(key, self._store.nbytes(key=key))
                if entry is not None:
                    moving.append((key, entry, self._store.read(key=key, target=entry.head)))
            while moving:
                key, entry, ticket = moving[0]
                ticket.wait()
                if not entry.is_on_drive:
                    self._store.discard(key=key)
                self._entries[key] = entry
                del moving[0]
        except BaseException:
            for _, entry, ticket in moving:
                with suppress(Exception):  # the first error is on its way up
                    ticket.wait()
                self._blocks[entry.stream].put(entry.begin, entry.begin + entry.head_bytes)
            raise

    def _move_out(self, key: str, entry: ResidentKey) -> None:
        """Put the head on the drive and give its memory back."""
        begin = 0 if entry.is_on_drive else None
        self._store.write(key=key, source=entry.head, offset_bytes=begin).wait()
        self._forget(key, entry)

    def _forget(self, key: str, entry: ResidentKey) -> None:
        del self._entries[key]
        self._blocks[entry.stream].put(entry.begin, entry.begin + entry.head_bytes)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous CPU tensor, in its own memory."""
    import torch

    return contiguous_cpu(tensor).detach().view(-1).view(torch.uint8)
