"""The registry of sub-groups: master weights and optimizer states in the store, by name.

Knows torch, the store, and the tiles and slots that bytes pass through; neither the order in which
sub-groups are stepped nor the optimizer's arithmetic. One thread at a time may call, except for
`get`, during which another thread may step other sub-groups.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from memascend.base.interfaces import TensorIO
from memascend.errors import StoreError
from memascend.streaming.optimizer.tile_memory import TileMemory
from memascend.transfer.staging import StagingSlots

#: Optimizer state of one parameter: tensors shaped as the parameter, and scalars.
State = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter's shard in a sub-group, and the location of its value.

    Attributes:
        offset: First element in the sub-group.
        numel: Elements.
        dtype: The parameter's own.
        key: Its name in the store; None when it lives in memory.
        tensor: The shard in memory, flat, on any device; None when it is in the store.
    """

    offset: int
    numel: int
    dtype: torch.dtype
    key: str | None = None
    tensor: torch.Tensor | None = None

    def overlap(self, begin: int, numel: int) -> tuple[int, int]:
        """Return (first element in the sub-group, count) of the overlap with a range of it.

        The count is not positive if there is no overlap.
        """
        first = max(begin, self.offset)
        return first, min(begin + numel, self.offset + self.numel) - first


@dataclass(slots=True)
class SubGroup:
    """The elements that the optimizer sees as one parameter.

    Attributes:
        name: Unique; part of its keys.
        numel: Elements on this rank.
        states: Dtype of each state in the store, in the optimizer's order.
        fills: States that have not been written yet, with the value of every element.
    """

    name: str
    numel: int
    states: dict[str, torch.dtype] = field(default_factory=dict)
    fills: dict[str, float] = field(default_factory=dict)

    def key(self, state: str | None = None) -> str:
        """Return the store's name for the master weights, or for a state."""
        return f"state.{self.name}.{state}" if state else f"master.{self.name}"

    @property
    def all_keys(self) -> list[str]:
        """All its keys in the store."""
        return [self.key(), *map(self.key, self.states)]


class SubGroups:
    """All sub-groups of one optimizer."""

    def __init__(self, *, store: TensorIO, slots: StagingSlots, tiles: TileMemory) -> None:
        """Make an empty registry.

        Args:
            store: Stores the sub-groups.
            slots: Staging slots for single values, and whole keys that are loaded.
            tiles: Memory in which sub-groups are created; gives the master weights' dtype.
        """
        self.store = store
        self._slots = slots
        self._tiles = tiles
        self._groups: dict[str, SubGroup] = {}

    def create(
        self,
        name: str,
        numel: int,
        members: Sequence[Member],
        advance: Callable[[int], None] | None = None,
    ) -> SubGroup:
        """Add a sub-group, and store the values of its members as its master weights.

        Args:
            name: Name of the sub-group.
            numel: Its number of elements.
            members: Source of the values.
            advance: Called with the bytes of each tile.

        Raises:
            StoreError: The drive failed.
            StoreFullError: The drive has no room for it.
        """
        group = SubGroup(name, numel)
        self.store.reserve(key=group.key(), nbytes=numel * self.master_dtype.itemsize)
        self._groups[name] = group
        for begin in self._tiles.begins(numel):
            tile = self._tiles.take(name, begin, numel)
            try:
                for member in members:
                    first, count = member.overlap(begin, tile.numel)
                    if count > 0:
                        target = tile.master.narrow(0, first - begin, count)
                        self._read_member(member, first - member.offset, target)
                self._tiles.write(tile, group.key(), tile.master)
                if advance is not None:
                    advance(tile.numel * self.master_dtype.itemsize)
            finally:
                self._tiles.retire(tile)
        return group

    def _read_member(self, member: Member, begin: int, target: torch.Tensor) -> None:
        if member.tensor is not None:
            target.copy_(member.tensor.narrow(0, begin, target.numel()))
            return
        assert member.key is not None
        offset = begin * member.dtype.itemsize
        self._slots.read(key=member.key, target=target, offset_bytes=offset, dtype=member.dtype)

    def contains(self, name: str) -> bool:
        """Return whether a sub-group of this name exists."""
        return name in self._groups

    def group(self, name: str) -> SubGroup:
        """Return a sub-group."""
        return self._groups[name]

    def begins(self, name: str) -> range:
        """Return the first element of each tile of a sub-group."""
        return self._tiles.begins(self._groups[name].numel)

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of all master weights."""
        return self._tiles.shape.master_dtype

    def add_state(
        self, name: str, state: str, dtype: torch.dtype, fill: float | None = None
    ) -> None:
        """Give a sub-group a state; with `fill` every element has that value until it is written.

        Raises:
            StoreFullError: The drive has no room for it.
        """
        group = self._groups[name]
        self.store.reserve(key=group.key(state), nbytes=group.numel * dtype.itemsize)
        group.states[state] = dtype
        if fill is not None:
            group.fills[state] = fill

    # -- single values ---------------------------------------------------------------------------

    def get(self, name: str, begin: int, target: torch.Tensor, *, state: str | None) -> None:
        """Fill a host tensor with a range of the master weights, or of a state, in its dtype."""
        group = self._groups[name]
        if state is not None and state in group.fills:
            target.fill_(group.fills[state])
            return
        stored = self._dtype(group, state)
        offset = begin * stored.itemsize
        self._slots.read(key=group.key(state), target=target, offset_bytes=offset, dtype=stored)

    def set(self, name: str, begin: int, value: torch.Tensor, *, state: str | None) -> None:
        """Replace a range of the master weights, or of a state, rounded to nearest even."""
        group = self._groups[name]
        self._tiles.drain()
        if state is not None and state in group.fills:
            self._write_out(group, state)
        stored = self._dtype(group, state)
        offset = begin * stored.itemsize
        self._slots.write(key=group.key(state), source=value, offset_bytes=offset, dtype=stored)
        self._slots.wait_writes()

    def _dtype(self, group: SubGroup, state: str | None) -> torch.dtype:
        return self.master_dtype if state is None else group.states[state]

    # -- checkpoints -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Write states that have one fill value, and wait until everything is in the store."""
        self._tiles.drain()
        for group in self._groups.values():
            for state in list(group.fills):
                self._write_out(group, state)
        self._slots.wait_writes()

    def load(
        self,
        name: str,
        *,
        state: str | None,
        dtype: torch.dtype,
        source: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Replace the master weights, or a state that may be new, as a whole.

        Args:
            name: The sub-group.
            state: None for the master weights.
            dtype: Dtype of the stored values.
            source: Called with (offset, uint8 tensor); fills the tensor with the bytes from there.

        Raises:
            StoreError: The drive failed.
        """
        group = self._groups[name]
        self._tiles.drain()
        nbytes = group.numel * dtype.itemsize
        make_anew(self.store, group.key(state), nbytes)
        if state is not None:
            group.states[state] = dtype
            group.fills.pop(state, None)
        self._slots.fill(key=group.key(state), nbytes=nbytes, source=source)

    def discard_states(self) -> None:
        """Drop every state, as for a new optimizer."""
        with suppress(StoreError):  # of dropped states, or raised again by the next read
            self._tiles.drain()
        for group in self._groups.values():
            for name in group.states:
                self.store.discard(key=group.key(name))
            group.states.clear()
            group.fills.clear()

    def discard(self) -> None:
        """Discard all keys, and drop the sub-groups."""
        self.discard_states()
        for group in self._groups.values():
            self.store.discard(key=group.key())
        self._groups.clear()

    def _write_out(self, group: SubGroup, state: str) -> None:
        """Write a state that still has one fill value."""
        dtype, fill = group.states[state], group.fills.pop(state)
        for begin, count in self._slots.chunks(group.numel, dtype.itemsize):
            staged = self._slots.take(count, dtype).fill_(fill)
            self._slots.submit(group.key(state), staged, begin * dtype.itemsize)


def make_anew(store: TensorIO, key: str, nbytes: int) -> None:
    """Discard and reserve a key that is about to be written completely, in parts.

    After a failed write the store refuses to read a key until it is written in one piece;
    discarding the key clears that state.

    Raises:
        StoreFullError: The drive has no room for it.
    """
    store.discard(key=key)
    store.reserve(key=key, nbytes=nbytes)
