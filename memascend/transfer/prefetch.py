"""Reads ahead the first chunks of the next tensor that has no slot, into staging slots.

Such a tensor (the embedding, the head) is read when it is needed. Without this the drive would idle
between the last read before it and its own. The chunks take no memory of their own: they use
staging slots that the pipeline would use next anyway. More slots would displace parameters that
backward needs again.

They delay no other transfer: SLOT_COUNT_MIN slots stay free for others. A transfer that needs one
more slot takes those of the chunks that are needed last.

Only keys that the store has may be read here, and a key is dropped before it is written. One
thread at a time may call. Ctrl-C may come anywhere (slots.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch

from memascend.transfer.slots import SLOT_COUNT_MIN
from memascend.transfer.transfer import Transfer


class StagingReads(Protocol):
    """The part of StagingSlots that is used here."""

    def __len__(self) -> int: ...

    def chunks(self, numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Cut a tensor into (begin, count) runs that fit a slot."""

    def reclaim(self, nbytes: int) -> bool:
        """Free slots of finished transfers, without waiting; return whether `nbytes` are free."""

    def start_read(self, key: str, offset_bytes: int, numel: int, dtype: torch.dtype) -> Transfer:
        """Take a slot and start a read into it."""

    def free(self, staged: torch.Tensor) -> None:
        """Free a taken slot that no copy reads."""


@dataclass(slots=True)
class _Begun:
    """A key, and its first chunks in order."""

    key: str
    numel: int
    dtype: torch.dtype
    has_given_way: bool = False
    chunks: deque[Transfer] = field(default_factory=deque)


class ChunkPrefetch:
    """Chunks read ahead into one set of staging slots, of one key at a time."""

    def __init__(self, slots: StagingReads) -> None:
        """Start with no chunks."""
        self._slots = slots
        self._begun: _Begun | None = None

    def start(self, *, key: str, numel: int, dtype: torch.dtype) -> None:
        """Start reading the first chunks of a key, as far as slots are free; never wait for one.

        Another call with the same key continues with the next chunks, unless some have given way:
        they would do so again. Chunks of another key are given up.

        Raises:
            StoreError: A read could not be started. The ticket reports one that fails later.
        """
        begun = self._begun
        if begun is None or (begun.key, begun.numel, begun.dtype) != (key, numel, dtype):
            self.drop()
            begun = self._begun = _Begun(key, numel, dtype)
        count_max = 0 if begun.has_given_way else len(self._slots) - SLOT_COUNT_MIN
        runs = self._slots.chunks(numel, dtype.itemsize)
        for begin, count in islice(runs, len(begun.chunks), max(0, count_max)):
            if not self._slots.reclaim(count * dtype.itemsize):
                return
            begun.chunks.append(self._slots.start_read(key, begin * dtype.itemsize, count, dtype))

    def take(self, key: str, numel: int, dtype: torch.dtype) -> deque[Transfer]:
        """Return the chunks of a key that is read now: their reads into taken slots."""
        begun = self._begun
        if begun is None or (begun.key, begun.numel, begun.dtype) != (key, numel, dtype):
            return deque()
        self._begun = None
        return begun.chunks

    def give_way(self) -> bool:
        """Free the slot of the last chunk, once its read is over; return False without chunks."""
        if self._begun is None or not self._begun.chunks:
            return False
        self._begun.has_given_way = True
        # Removed first, not to be freed twice. An error is raised by the read that needs the chunk.
        read = self._begun.chunks.pop()
        if read.abandon():
            self._slots.free(read.staged)
        return True

    def drop(self, key: str | None = None) -> None:
        """Give up the chunks of `key`, which is about to be written; None: of any key."""
        if self._begun is not None and key in (None, self._begun.key):
            while self.give_way():
                pass
            self._begun = None
