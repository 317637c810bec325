"""The optimizer path: each sub-group is walked in tiles, drive to host to drive.

Knows torch, the store and the gradient spool; never DeepSpeed. A tile is a fixed-size run of
elements of one sub-group: master weights, states and gradients are read, the optimizer works on
them, and all but the gradients are written back, the parameters' own dtype included. Several tiles
are in flight, also from one sub-group to the next, so that reads, arithmetic and writes overlap.

The optimizer itself is the caller's: the parameter it knows (a tensor that is empty between steps)
is pointed at one tile after the other. Scalar states (`step`) are put back before every tile, so
that a sub-group counts as one parameter, as it does when it is stepped whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import torch

from memascend.base.interfaces import TensorIO
from memascend.errors import StoreError
from memascend.streaming.gradients import Factor, GradientSpool
from memascend.streaming.staging import StagingSlots
from memascend.streaming.sub_groups import (
    Member,
    State,
    SubGroup,
    Wholeness,
    clone,
    is_state_tensor,
    let_go,
    make_anew,
)
from memascend.streaming.tiles import Tile, Tiles


class OptimizerStream:
    """Sub-groups in the store, and the walk over them. One thread at a time may call."""

    def __init__(
        self, *, store: TensorIO, tiles: Tiles, slots: StagingSlots, spool: GradientSpool
    ) -> None:
        """Wires the stream.

        Args:
            store: Where the sub-groups are kept.
            tiles: Where the work is done.
            slots: What single values pass through.
            spool: Where the gradients come from.
        """
        self._store = store
        self._tiles = tiles
        self._slots = slots
        self._spool = spool
        self._groups: dict[str, SubGroup] = {}
        self._coming: Iterator[tuple[SubGroup, int]] = iter(())
        self._reading: deque[Tile] = deque()
        #: Whether all values belong to one step; `mend` it when all of them were replaced.
        self.wholeness = Wholeness()

    # -- sub-groups ------------------------------------------------------------------------------

    def create(self, name: str, numel: int, fill: Callable[[int, torch.Tensor], None]) -> SubGroup:
        """Adds a sub-group and stores its master weights.

        Args:
            name: Unique.
            numel: Elements on this rank.
            fill: Called with first element and target for one range after the other.

        Raises:
            StoreFullError: The drive has no room for it.
        """
        group = SubGroup(name, numel)
        self._store.reserve(key=group.key(), nbytes=numel * self.master_dtype.itemsize)
        self._groups[name] = group
        for begin in self._begins(group):
            tile = self._tiles.take(name, begin, numel)
            try:
                fill(begin, tile.master.narrow(0, 0, tile.numel))
                self._tiles.write(tile, group.key(), tile.master)
            finally:
                self._tiles.retire(tile)
        return group

    def contains(self, name: str) -> bool:
        """Whether there is such a sub-group."""
        return name in self._groups

    def group(self, name: str) -> SubGroup:
        """A sub-group."""
        return self._groups[name]

    @property
    def master_dtype(self) -> torch.dtype:
        """Of all master weights."""
        return self._tiles.shape.master_dtype

    def has_states(self, name: str) -> bool:
        """Whether a sub-group has any state yet."""
        return bool(self._groups[name].states)

    def add_state(self, name: str, state: str, dtype: torch.dtype, fill: float) -> None:
        """Gives a sub-group a state, every element of which is `fill`; nothing is written yet.

        Raises:
            StoreFullError: The drive has no room for it.
        """
        group = self._groups[name]
        self._store.reserve(key=group.key(state), nbytes=group.numel * dtype.itemsize)
        group.states[state] = dtype
        group.fills[state] = fill

    # -- the step --------------------------------------------------------------------------------

    def begin(self, names: Sequence[str]) -> None:
        """Starts a walk over sub-groups, which are then to be stepped in this order.

        Raises:
            TornStepError: The last walk ended half-way.
        """
        self.drain()
        self.wholeness.begin(len(names))
        groups = [self._groups[name] for name in names]
        self._coming = ((group, begin) for group in groups for begin in self._begins(group))

    def step(
        self,
        name: str,
        *,
        parameter: torch.Tensor,
        state: Callable[[], State],
        update: Callable[[], None],
        factor: Factor,
        members: Sequence[Member],
    ) -> None:
        """Steps the next sub-group of the walk.

        Args:
            name: The sub-group.
            parameter: What the optimizer knows it as; empty again on return.
            state: Gives the optimizer's state of the parameter.
            update: One step of the optimizer on `parameter` and its `grad`.
            factor: What gradients are multiplied by first (unscaling and clipping).
            members: Its parameters; each gets its new value.

        Raises:
            StoreError: The drive failed.
        """
        group = self._groups[name]
        try:
            self._walk(group, parameter, state, update, factor, members)
        finally:
            let_go(parameter, state(), group)
        group.fills.clear()
        self._spool.note_factor(name, factor, parameter.dtype)
        self.wholeness.note_stepped()

    def _walk(
        self,
        group: SubGroup,
        parameter: torch.Tensor,
        state: Callable[[], State],
        update: Callable[[], None],
        factor: Factor,
        members: Sequence[Member],
    ) -> None:
        """The tiles of one sub-group; arguments as in `step`."""
        name = group.name
        makes_states = not group.states
        scalars = clone({k: v for k, v in state().items() if k not in group.states})
        for begin in self._begins(group):
            tile = self._next(group, begin)
            try:
                gradient = self._tiles.gradient(tile)
                self._spool.load(name, begin, tile.raw.narrow(0, 0, tile.numel), gradient)
                gradient.mul_(factor)
                parameter.data = tile.master.narrow(0, 0, tile.numel)
                parameter.grad = gradient
                values = state()
                if makes_states:
                    values.clear()
                values.update(clone(scalars))
                if not makes_states:
                    self._point_states(tile, group, values)
                self.wholeness.note_change()
                update()
                self._collect_states(tile, group, state())
                self._write_back(tile, group, members)
            finally:
                self._tiles.retire(tile)

    def refresh(self, name: str, members: Sequence[Member]) -> None:
        """Gives every member the value of its master weights."""
        group = self._groups[name]
        self.drain()
        for member in members:
            if member.key is not None:
                make_anew(self._store, member.key, member.numel * member.dtype.itemsize)
        for begin in self._begins(group):
            tile = self._tiles.take(name, begin, group.numel)
            try:
                self._tiles.read(tile, group.key(), tile.master)
                tile.wait()
                self._give_to_members(tile, members)
            finally:
                self._tiles.retire(tile)

    def drain(self) -> None:
        """Waits until nothing is in flight; the walk under way, if any, is over.

        Raises:
            StoreError: A transfer failed; the others have been waited for.
        """
        self._coming = iter(())
        while self._reading:
            self._tiles.retire(self._reading.popleft())
        self._tiles.drain()

    # -- single values ---------------------------------------------------------------------------

    def get(self, name: str, begin: int, target: torch.Tensor, *, state: str | None) -> None:
        """Fills a host tensor with a range of the master weights, or of a state."""
        group = self._groups[name]
        self.drain()
        if state is not None and state in group.fills:
            target.fill_(group.fills[state])
            return
        offset = begin * target.element_size()
        self._slots.read(key=group.key(state), target=target, offset_bytes=offset)

    def set(self, name: str, begin: int, value: torch.Tensor, *, state: str | None) -> None:
        """Replaces a range of the master weights, or of a state, in its own dtype."""
        group = self._groups[name]
        self.drain()
        if state is not None and state in group.fills:
            self._write_out(group, state)
        offset = begin * value.element_size()
        self._slots.write(key=group.key(state), source=value, offset_bytes=offset)
        self._slots.wait_writes()

    # -- checkpoints -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Writes out what so far is one value, and waits until everything is in the store.

        Raises:
            TornStepError: The last step ended half-way.
        """
        self.wholeness.check()
        self.drain()
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
        """Replaces the master weights, or a state that may be new, as a whole.

        Args:
            name: The sub-group.
            state: None for the master weights.
            dtype: Of the state.
            source: Fills a uint8 tensor with the bytes from an offset on.

        Raises:
            StoreError: The drive failed.
        """
        group = self._groups[name]
        self.drain()
        self.wholeness.note_change()
        nbytes = group.numel * dtype.itemsize
        make_anew(self._store, group.key(state), nbytes)
        if state is not None:
            group.states[state] = dtype
            group.fills.pop(state, None)
        self._slots.fill(key=group.key(state), nbytes=nbytes, source=source)

    def forget_states(self) -> None:
        """Drops every state; the optimizer begins anew."""
        with suppress(StoreError):  # of what is dropped, or told again by who reads it
            self.drain()
        for group in self._groups.values():
            for name in group.states:
                self._store.discard(key=group.key(name))
            group.states.clear()
            group.fills.clear()

    def discard(self) -> None:
        """Gives the drive's space back."""
        self.forget_states()
        for group in self._groups.values():
            self._store.discard(key=group.key())
        self._groups.clear()

    # -- the walk --------------------------------------------------------------------------------

    def _begins(self, group: SubGroup) -> range:
        return range(0, group.numel, self._tiles.shape.numel)

    def _next(self, group: SubGroup, begin: int) -> Tile:
        """The tile that is due, read; those after it are on their way."""
        self._read_ahead()
        tile = self._reading.popleft()
        try:
            if (tile.owner, tile.begin) != (group.name, begin):
                raise AssertionError(f"{group.name} is stepped out of the order of begin()")
            self._read_ahead()
            tile.wait()
        except BaseException:
            self._tiles.retire(tile)
            raise
        return tile

    def _read_ahead(self) -> None:
        """Starts reading what comes next: one tile if there is any, more while tiles are idle."""
        while self._tiles.has_idle() or (not self._reading and self._tiles.has_retired()):
            following = next(self._coming, None)
            if following is None:
                return
            group, begin = following
            tile = self._tiles.take(group.name, begin, group.numel)
            self._reading.append(tile)
            self._tiles.read(tile, group.key(), tile.master)
            for number, (name, dtype) in enumerate(group.states.items()):
                block = self._tiles.state(tile, number, dtype)
                if name in group.fills:
                    block.fill_(group.fills[name])
                else:
                    self._tiles.read(tile, group.key(name), block)
            raw = tile.raw.narrow(0, 0, tile.numel)
            tile.tickets += self._spool.start_read(group.name, begin, raw)

    # -- what the optimizer sees -----------------------------------------------------------------

    def _point_states(self, tile: Tile, group: SubGroup, values: State) -> None:
        for number, (name, dtype) in enumerate(group.states.items()):
            block = self._tiles.state(tile, number, dtype)
            if isinstance(values.get(name), torch.Tensor):
                values[name].data = block
            else:
                values[name] = block

    def _collect_states(self, tile: Tile, group: SubGroup, values: State) -> None:
        """Finds states that the optimizer made or put elsewhere, and has them in the tile."""
        for name, value in values.items():
            if not is_state_tensor(name, value, tile.numel):
                continue
            if name not in group.states:
                nbytes = group.numel * value.element_size()
                self._store.reserve(key=group.key(name), nbytes=nbytes)
                group.states[name] = value.dtype
            number = list(group.states).index(name)
            block = self._tiles.state(tile, number, value.dtype)
            if value.data_ptr() != block.data_ptr():
                block.copy_(value)
                value.data = block

    def _write_back(self, tile: Tile, group: SubGroup, members: Sequence[Member]) -> None:
        self._tiles.write(tile, group.key(), tile.master)
        for number, (name, dtype) in enumerate(group.states.items()):
            self._tiles.write(tile, group.key(name), self._tiles.state(tile, number, dtype))
        self._give_to_members(tile, members)

    def _give_to_members(self, tile: Tile, members: Sequence[Member]) -> None:
        end = tile.begin + tile.numel
        for member in members:
            first = max(tile.begin, member.offset)
            count = min(end, member.offset + member.numel) - first
            if count <= 0:
                continue
            source = tile.master.narrow(0, first - tile.begin, count)
            is_in_host = member.tensor is not None and member.tensor.device.type == "cpu"
            if member.dtype != source.dtype and not is_in_host:
                # A copy to a device that casts would make a host temporary of its own.
                if tile.cast is None:
                    raise AssertionError(f"no room to cast {source.dtype} to {member.dtype}")
                source = tile.cast.narrow(0, first - tile.begin, count).copy_(source)
            if member.tensor is not None:
                member.tensor.narrow(0, first - member.offset, count).copy_(source)
                continue
            if member.key is None:
                raise AssertionError(f"a member at {member.offset} lives nowhere")
            offset_bytes = (first - member.offset) * source.element_size()
            self._tiles.write_part(tile, member.key, source, offset_bytes)

    def _write_out(self, group: SubGroup, state: str) -> None:
        """Writes a state that so far is one value."""
        dtype, fill = group.states[state], group.fills.pop(state)
        for begin, count in self._slots.chunks(group.numel, dtype.itemsize):
            staged = self._slots.take(count, dtype).fill_(fill)
            self._slots.submit(group.key(state), staged, begin * dtype.itemsize)
