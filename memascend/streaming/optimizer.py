"""The optimizer path: each sub-group is walked in tiles, drive to host to drive.

Knows torch, the store and the gradient spool; never DeepSpeed. A tile is a fixed-size run of
elements of one sub-group: master weights, states and gradients are read, the optimizer works on
them, and all but the gradients are written back, the parameters' own dtype included. Several tiles
are in flight, also from one sub-group to the next, so that reads, arithmetic and writes overlap.

The optimizer itself is the caller's: the parameter it knows (a tensor that is empty between steps)
is pointed at one tile after the other. Scalar states (`step`) are put back before every tile, so
that a sub-group counts as one parameter, as it does when it is stepped whole. Where the caller has
one, a fused update does all of it in one pass: it takes the gradient as it is stored, and gives the
new weights in the parameters' own dtype besides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from memascend.streaming.gradients import Factor, GradientSpool
from memascend.streaming.sub_groups import Member, State, SubGroup, SubGroups, make_anew
from memascend.streaming.tiles import Tile, Tiles


class FusedUpdate(Protocol):
    """One step of an optimizer on a tile."""

    def __call__(
        self,
        *,
        gradient: torch.Tensor,
        factor: float,
        weight: torch.Tensor,
        values: State,
        output: torch.Tensor | None,
    ) -> None:
        """Step in place.

        Args:
            gradient: In whatever dtype it is stored; may be overwritten.
            factor: What it is multiplied by first.
            weight: The master weights.
            values: The optimizer's state, which is brought forward.
            output: Becomes the new weights in its own dtype.
        """


class OptimizerStream:
    """The walk over sub-groups. One thread at a time may call."""

    def __init__(self, *, groups: SubGroups, tiles: Tiles, spool: GradientSpool) -> None:
        """Wire the stream.

        Args:
            groups: What is walked over.
            tiles: Where the work is done; the same that `groups` has.
            spool: Where the gradients come from.
        """
        self._groups = groups
        self._tiles = tiles
        self._spool = spool
        self._coming: Iterator[tuple[SubGroup, int]] = iter(())
        self._reading: deque[Tile] = deque()

    def begin(self, names: Sequence[str]) -> None:
        """Start a walk over sub-groups, which are then to be stepped in this order.

        Raises:
            TornStepError: The last walk ended half-way.
        """
        self.drain()
        self._spool.submit()
        self._groups.integrity.begin(len(names))
        groups = [self._groups.group(name) for name in names]
        self._coming = (
            (group, begin) for group in groups for begin in self._tiles.begins(group.numel)
        )

    def step(
        self,
        name: str,
        reach: Callable[[int], None] = lambda end: None,
        *,
        parameter: torch.Tensor,
        states: Mapping[torch.Tensor, State],
        update: Callable[[], None],
        factor: Factor,
        members: Sequence[Member],
        fused: FusedUpdate | None = None,
    ) -> None:
        """Step the next sub-group of the walk.

        Args:
            name: The sub-group.
            reach: Told which of its elements, from the first on, are new for whoever reads them.
            parameter: What the optimizer knows it as; empty again on return.
            states: The optimizer's state by parameter.
            update: One step of the optimizer on `parameter` and its `grad`.
            factor: What gradients are multiplied by first (unscaling and clipping).
            members: Its parameters; each gets its new value.
            fused: Taken instead of `update` by a sub-group that has all of its states.

        Raises:
            StoreError: The drive failed.
        """
        group = self._groups.group(name)
        makes_states = not group.states
        if makes_states:
            fused = None
        scalars = _clone({k: v for k, v in states[parameter].items() if k not in group.states})
        try:
            for begin in self._tiles.begins(group.numel):
                with self._due(group, begin) as tile:
                    values = states[parameter]
                    if makes_states:
                        values.clear()
                    values.update(_clone(scalars))
                    if not makes_states:
                        self._point_states(tile, group, values)
                    if fused is not None:
                        self._step_fused(tile, fused, values, factor)
                    else:
                        # A gradient is refused where it has not the shape of the data.
                        parameter.data = tile.master.narrow(0, 0, tile.numel)
                        parameter.grad = self._load_gradient(tile, factor)
                        self._groups.integrity.note_change()
                        update()
                        self._collect_states(tile, group, states[parameter])
                    self._write_back(tile, group, members, is_cast=fused is not None)
                reach(min(begin + self._tiles.shape.numel, group.numel))
        except BaseException:
            self._stop()
            raise
        finally:
            _let_go(parameter, states[parameter], group)
        group.fills.clear()
        self._spool.note_factor(name, factor, parameter.dtype)
        self._groups.integrity.note_stepped()

    def refresh(self, name: str, members: Sequence[Member]) -> None:
        """Give every member the value of its master weights."""
        group = self._groups.group(name)
        self.drain()
        for member in members:
            if member.key is not None:
                nbytes = member.numel * member.dtype.itemsize
                make_anew(self._groups.store, member.key, nbytes)
        for begin in self._tiles.begins(group.numel):
            tile = self._tiles.take(name, begin, group.numel)
            try:
                self._tiles.read(tile, group.key(), tile.master)
                tile.wait()
                self._give_to_members(tile, members, is_cast=False)
            finally:
                self._tiles.retire(tile)

    def drain(self) -> None:
        """Wait until nothing is in flight; the walk under way, if any, is over.

        Raises:
            StoreError: A transfer failed; the others have been waited for.
        """
        self._stop()
        self._tiles.drain()

    # -- reading ahead ---------------------------------------------------------------------------

    def _stop(self) -> None:
        """End the walk; what was read ahead is in flight still."""
        self._coming = iter(())
        while self._reading:
            self._tiles.retire(self._reading.popleft())

    @contextmanager
    def _due(self, group: SubGroup, begin: int) -> Iterator[Tile]:
        """Lend the tile that is due, read; those after it are on their way."""
        self._read_ahead()
        tile = self._reading.popleft()
        try:
            if (tile.owner, tile.begin) != (group.name, begin):
                raise AssertionError(f"{group.name} is stepped out of the order of begin()")
            self._read_ahead()
            tile.wait()
            yield tile
        finally:
            self._tiles.retire(tile)

    def _read_ahead(self) -> None:
        """Start reading what comes next: one tile if there is any, more while tiles are idle."""
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

    # -- the optimizer's view --------------------------------------------------------------------

    def _point_states(self, tile: Tile, group: SubGroup, values: State) -> None:
        for number, (name, dtype) in enumerate(group.states.items()):
            block = self._tiles.state(tile, number, dtype)
            if isinstance(values.get(name), torch.Tensor):
                values[name].data = block
            else:
                values[name] = block

    def _step_fused(self, tile: Tile, fused: FusedUpdate, values: State, factor: Factor) -> None:
        """Step a tile in one pass, of its gradient as it is stored where that is all of it."""
        gradient = tile.raw.narrow(0, 0, tile.numel)
        multiplier = _as_number(factor)
        if not self._spool.complete(tile.owner, tile.begin, gradient) or multiplier is None:
            gradient, multiplier = self._load_gradient(tile, factor), 1.0
        self._groups.integrity.note_change()
        fused(
            gradient=gradient,
            factor=multiplier,
            weight=tile.master.narrow(0, 0, tile.numel),
            values=values,
            output=None if tile.cast is None else tile.cast.narrow(0, 0, tile.numel),
        )

    def _load_gradient(self, tile: Tile, factor: Factor) -> torch.Tensor:
        """Return a tile's gradient in the step's dtype, multiplied."""
        gradient = self._tiles.gradient(tile)
        self._spool.load(tile.owner, tile.begin, tile.raw.narrow(0, 0, tile.numel), gradient)
        return gradient.mul_(factor)

    def _collect_states(self, tile: Tile, group: SubGroup, values: State) -> None:
        """Put states that the optimizer made, or put elsewhere, into the tile."""
        for name, value in values.items():
            if not _is_state_tensor(name, value, tile.numel):
                continue
            if name not in group.states:
                self._groups.add_state(group.name, name, value.dtype)
            number = list(group.states).index(name)
            block = self._tiles.state(tile, number, value.dtype)
            if value.data_ptr() != block.data_ptr():
                block.copy_(value)
                value.data = block

    def _write_back(
        self, tile: Tile, group: SubGroup, members: Sequence[Member], *, is_cast: bool
    ) -> None:
        self._tiles.write(tile, group.key(), tile.master)
        for number, (name, dtype) in enumerate(group.states.items()):
            self._tiles.write(tile, group.key(name), self._tiles.state(tile, number, dtype))
        self._give_to_members(tile, members, is_cast=is_cast)

    def _give_to_members(self, tile: Tile, members: Sequence[Member], *, is_cast: bool) -> None:
        """Give members the tile's weights; with `is_cast` it has them in 16 bits too."""
        for member in members:
            first, count = member.overlap(tile.begin, tile.numel)
            if count <= 0:
                continue
            source = tile.master.narrow(0, first - tile.begin, count)
            if is_cast and tile.cast is not None and member.dtype == tile.cast.dtype:
                source = tile.cast.narrow(0, first - tile.begin, count)
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


def _as_number(factor: Factor) -> float | None:
    """Return a factor that fp32 is multiplied by as fp32; None for a tensor that may promote it."""
    if not isinstance(factor, torch.Tensor):
        return float(factor)
    return None if factor.dim() or factor.device.type != "cpu" else float(factor)


def _is_state_tensor(name: str, value: object, numel: int) -> bool:
    """Return whether a value of the state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == (numel,)


def _clone(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Make a copy that an optimizer cannot change."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def _let_go(parameter: torch.Tensor, values: State, group: SubGroup) -> None:
    """Take the tile's memory away from a parameter and its states."""
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    for name in group.states:
        if isinstance(values.get(name), torch.Tensor):
            values[name].data = values[name].data.new_empty(0)
