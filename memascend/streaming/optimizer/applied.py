"""Updates of matrices that are applied as they are made, so that none is written and read again.

Weights change before it is known whether there is a step. So their new values lie beside the old
ones, as those of steps during backward, until the walk takes them over. Momentum moves on in any
case; the one of before stays under the second key, so that the last update can be made again for a
matrix that gets no gradient before the next step. Tiles that are stepped during backward have their
second values here, too. Knows torch and the streams; neither which update it is nor how ranks
exchange their parts. One thread at a time may call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from memascend.errors import StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.streaming.optimizer.step import Begins
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_group import Member
from memascend.streaming.optimizer.sub_group_step import early_key
from memascend.streaming.optimizer.sub_groups import make_anew

#: Offset in the sub-group, and an update from there on, 1-D, on any device.
Update = tuple[int, torch.Tensor]
#: Called with a tile's weights and their update; changes the weights.
Apply = Callable[[torch.Tensor, torch.Tensor], None]


class AppliedUpdates:
    """The second values of sub-groups that take updates as they are made."""

    def __init__(self, *, stream: OptimizerStream, store: ResidentStore, state: str) -> None:
        """Reserve nothing yet.

        Args:
            stream: Steps the tiles.
            store: Where the values are.
            state: Name of the momentum.
        """
        self._stream, self._store, self._state = stream, store, state
        self._keys: set[str] = set()  # that have a second key
        self._begins: dict[str, frozenset[int]] = {}
        self._reserved: set[str] = set()  # sub-groups that have them
        self._broken: set[str] = set()  # those whose second keys an error may have made unreadable

    def is_on_drive(self, name: str, members: Sequence[Member]) -> bool:
        """Return whether all values of a sub-group are on the drive, none in memory."""
        keys = self._keys_of(name, members)
        if None in keys:
            return False
        return not any(self._store.memory_of(key=key) for key in keys if key is not None)

    def reserve(self, name: str, members: Sequence[Member]) -> bool:
        """Reserve room for a sub-group's second values; return whether it had none.

        Raises:
            StoreFullError: The drive has none; nothing is reserved for this sub-group any more.
        """
        is_broken = name in self._broken
        reserve = partial(make_anew, self._store) if is_broken else self._store.reserve
        keys = [key for key in self._keys_of(name, members) if key is not None]
        try:
            for key in keys:
                reserve(key=early_key(key), nbytes=self._store.nbytes(key=key))
        except StoreFullError:
            self._discard(keys)
            raise
        is_new = not self._keys.issuperset(keys)
        self._keys |= set(keys)
        self._reserved.add(name)
        self._broken.discard(name)
        return is_new

    def note_failure(self) -> None:
        """Note that a write failed: all second keys may be unreadable, until `reserve`."""
        self._broken |= self._reserved

    def start(self, names: Iterable[str]) -> None:
        """Start reading the tiles of these sub-groups, which `apply` then steps in this order.

        Raises:
            StoreError: A write of the last walk failed.
        """
        self._stream.drain()
        self.drop()
        started = list(names)
        self._broken |= set(started)  # until `finish`
        for name in started:
            for begin in self._stream.groups.begins(name):
                self._stream.queue_early(name, begin)

    def apply(
        self, name: str, members: Sequence[Member], updates: Iterator[Update], apply: Apply
    ) -> None:
        """Step the next sub-group by updates that come in the order of its elements.

        Raises:
            StoreError: The drive failed; other errors come from `updates`.
        """
        filling = _Filling(updates)
        begins = self._stream.groups.begins(name)
        for _ in begins:
            self._stream.step_next(members, filling.fill, apply)
        self._begins[name] = frozenset(begins)

    def finish(self) -> None:
        """Wait until second values are written, and let momentum take its own over.

        Raises:
            StoreError: The drive failed.
        """
        self._stream.drain()
        self.take_over_momentum(self._begins)
        self._broken -= set(self._begins)

    def take_over_momentum(self, names: Iterable[str]) -> None:
        """Let the momentum of these sub-groups take over its second values, all of them written."""
        for name in names:
            key = self._stream.groups.group(name).key(self._state)
            self._store.take_over(key=key, other=early_key(key))

    def take(self) -> Begins:
        """Return the first elements of tiles that have second values, for the walk."""
        return dict(self._begins)

    def drop(self) -> None:
        """Drop second values: the step is over, or there is none."""
        self._begins.clear()

    def discard(self) -> None:
        """Free the drive space of all second values."""
        self.drop()
        self._discard(self._keys)
        for names in (self._keys, self._reserved, self._broken):
            names.clear()

    def _discard(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._store.discard(key=early_key(key))

    def _keys_of(self, name: str, members: Sequence[Member]) -> list[str | None]:
        group = self._stream.groups.group(name)
        return [*group.all_keys, group.key(self._state), *(member.key for member in members)]


class _Filling:
    """Fills tiles of one sub-group, in order, with updates that come in order."""

    def __init__(self, updates: Iterator[Update]) -> None:
        self._updates = updates
        self._coming: Update | None = None  # the rest of an update that was not used up

    def fill(self, begin: int, block: torch.Tensor) -> None:
        """Fill a tile's block; elements without an update get zeros."""
        filled, end = begin, begin + block.numel()
        while filled < end:
            coming, self._coming = self._coming, None  # before the next is made: its memory is free
            offset, update = coming or next(self._updates, (end, block[:0]))
            first = min(offset, end)
            block.narrow(0, filled - begin, first - filled).zero_()
            count = min(update.numel(), end - first)
            block.narrow(0, first - begin, count).copy_(update.narrow(0, 0, count))
            filled = first + count
            if count < update.numel():
                self._coming = offset + count, update.narrow(0, count, update.numel() - count)
            del coming, update
