"""The first chunks of the tensor in chunks that is needed next, read ahead into staging slots.

Such a tensor (the embedding, the head) is read when it is needed. What its first chunks would make
whoever needs it wait for is the time between the last read ahead of it and its own, in which the
drive has nothing to do. They take no memory of their own: they are in slots that the rest of the
pipeline would use next anyway, and more slots would push parameters out that backward needs again.

Nobody is held up for them. SLOT_COUNT_MIN slots are everybody else's, who wait for one another as
ever; a transfer that has them all and needs one more gets those of the chunks that are needed last.

Only what the store has may be here, and it is forgotten before anybody writes the key. One thread
at a time may call; Ctrl-C may come anywhere, and what it leaves is found again (lent_slots.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch

from memascend.base.interfaces import Ticket
from memascend.streaming.lent_slots import SLOT_COUNT_MIN

#: A taken slot, and who fills it.
Chunk = tuple[torch.Tensor, Ticket]


class Slots(Protocol):
    """What is asked of the staging slots."""

    def __len__(self) -> int: ...

    def chunks(self, numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
        """Cut a tensor into (begin, count) runs that fit a slot."""

    def reclaim(self, nbytes: int) -> bool:
        """Free what has passed, without waiting; return whether so many bytes can be taken now."""

    def start_read(self, key: str, offset_bytes: int, numel: int, dtype: torch.dtype) -> Chunk:
        """Take a slot and start a read into it."""

    def free(self, staged: torch.Tensor) -> None:
        """Free a taken slot that no copy reads."""


@dataclass(slots=True)
class _Begun:
    """A tensor, and its first chunks in order."""

    key: str
    numel: int
    dtype: torch.dtype
    has_given_way: bool = False
    chunks: deque[Chunk] = field(default_factory=deque)


class ChunksAhead:
    """Of one set of staging slots; of one tensor at a time."""

    def __init__(self, slots: Slots) -> None:
        """Begin with none."""
        self._slots = slots
        self._begun: _Begun | None = None

    def start(self, *, key: str, numel: int, dtype: torch.dtype) -> None:
        """Start reading the first chunks of a key, as far as slots are free; never wait for one.

        Again goes on with the next chunks, unless some have given way: they would again. What was
        begun of another key is given up.

        Raises:
            StoreError: A read could not be started; one that fails later is an error of `take`.
        """
        begun = self._begun
        if begun is None or (begun.key, begun.numel, begun.dtype) != (key, numel, dtype):
            self.forget()
            begun = self._begun = _Begun(key, numel, dtype)
        count_max = 0 if begun.has_given_way else len(self._slots) - SLOT_COUNT_MIN
        runs = self._slots.chunks(numel, dtype.itemsize)
        for begin, count in islice(runs, len(begun.chunks), max(0, count_max)):
            if not self._slots.reclaim(count * dtype.itemsize):
                return
            begun.chunks.append(self._slots.start_read(key, begin * dtype.itemsize, count, dtype))

    def take(self, key: str, numel: int, dtype: torch.dtype) -> deque[Chunk]:
        """Hand over what there is of a key that is read now: taken slots, and who fills them."""
        begun = self._begun
        if begun is None or (begun.key, begun.numel, begun.dtype) != (key, numel, dtype):
            return deque()
        self._begun = None
        return begun.chunks

    def give_way(self) -> bool:
        """Free the slot of the last chunk, once the drive has let go of it; False without any."""
        if self._begun is None or not self._begun.chunks:
            return False
        self._begun.has_given_way = True
        # Taken off first: after Ctrl-C nobody has it, and it is found.
        staged, ticket = self._begun.chunks.pop()
        with suppress(Exception):  # nobody needs it now; who does will see the error
            ticket.wait()
        if ticket.done():  # else a drive that is silent as the program ends may fill it still
            self._slots.free(staged)
        return True

    def forget(self, key: str | None = None) -> None:
        """Give up what there is, of one key or at all: the key is about to be written."""
        if self._begun is not None and key in (None, self._begun.key):
            while self.give_way():
                pass
            self._begun = None
