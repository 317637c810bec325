"""The optimizer path: each sub-group is stepped tile by tile, drive to host to drive.

Knows torch, the store and the gradient stream; never DeepSpeed. A tile is a fixed-size run
of elements of one sub-group. Master weights, states and gradients are read, the optimizer steps
them, and all but the gradients are written back, with the parameters in their own dtype. Several
tiles are in flight, also from one sub-group to the next, so that reads, arithmetic and writes
overlap.

The optimizer belongs to the caller: the parameter it knows (a tensor that is empty between steps)
is pointed at one tile after the other. Scalar states (`step`) are restored before every tile, so
that a sub-group counts as one parameter, as in an untiled step. If the caller has a fused update,
that does all of it in one pass: it takes the gradient in its stored dtype, and also writes the new
weights in the parameters' own dtype.

Tiles may be stepped early, before it is known whether there will be a step. Their new
values are written to keys of their own beside the old ones. The walk then skips these tiles, writes
the rest of their sub-group to the same new keys, and lets the old keys take over the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memascend.kernels.halves import clear_flags, flag_bytes, round_high
from memascend.memory.pool import Lease
from memascend.streaming.gradients.accumulation import Factor
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.hand_over import HandOver
from memascend.streaming.optimizer.prefetch import TilePrefetch
from memascend.streaming.optimizer.step import Step
from memascend.streaming.optimizer.sub_group import (
    FLAGS,
    SCALES,
    MasterForm,
    Member,
    State,
    SubGroup,
)
from memascend.streaming.optimizer.sub_group_step import (
    EarlyStep,
    FusedUpdate,
    SubGroupStep,
    as_number,
    copy_scalars,
    early_key,
    empty_parameter,
    is_state_tensor,
    step_by_update,
    step_nothing,
)
from memascend.streaming.optimizer.sub_groups import SubGroups, make_anew
from memascend.streaming.optimizer.tile_memory import Tile, TileMemory


class OptimizerStream:
    """The walk over sub-groups. One thread at a time may call."""

    def __init__(
        self,
        *,
        groups: SubGroups,
        tiles: TileMemory,
        gradient_stream: GradientStream,
        take_over: Callable[..., None] | None = None,
        hand_over: HandOver | None = None,
    ) -> None:
        """Wire the stream.

        Args:
            groups: The sub-groups.
            tiles: The tiles; the same object that `groups` has.
            gradient_stream: Source of the gradients.
            take_over: Moves the contents of `other` to `key`; None if no tile is stepped early.
            hand_over: Slots that wait for members' new values.
        """
        self.groups = groups
        self.tiles = tiles
        self._gradient_stream = gradient_stream
        self._take_over = take_over
        self._hand_over = hand_over or HandOver()
        self._prefetch = TilePrefetch(groups=groups, tiles=tiles, gradient_stream=gradient_stream)
        self._step = Step()  # of the walk

    def start(self, step: Step) -> None:
        """Start the walk of a step that is decided; sub-groups are then stepped in its order.

        Raises:
            StoreError: A write of the last walk failed.
        """
        self.tiles.drain()
        self.groups.discard_unused()
        self._gradient_stream.submit()
        self._step = step
        self._prefetch.start(step.order, step.early)

    def prefetch(self, names: Sequence[str]) -> None:
        """Start reading the first tiles of the next walk, before all gradients are complete.

        Call `drop_prefetched` before weights or states change outside the walk.

        Args:
            names: All sub-groups, in the order of the walk.
        """
        self._prefetch.read_first(names)

    def drop_prefetched(self) -> None:
        """Drop tiles that were read for the next walk: their values are about to change."""
        self._prefetch.drop_prefetched()

    def step(self, step: SubGroupStep, reach: Callable[[int], None] = lambda end: None) -> None:
        """Step the next sub-group of the walk.

        Args:
            step: The step of the sub-group.
            reach: Called with the number of leading elements whose new values can be read.

        Raises:
            StoreError: The drive failed.
        """
        group = self.groups.group(step.name)
        early = self._step.early.get(step.name, frozenset())
        begins = self.tiles.begins(group.numel)
        makes_states = not group.states
        values = step.states[step.parameter]
        scalars = copy_scalars({k: v for k, v in values.items() if k not in group.states})
        try:
            for begin in begins:
                if begin not in early:
                    with self._due(group, begin) as tile:
                        self._step_tile(tile, group, step, scalars, makes_states=makes_states)
                end = min(begin + begins.step, group.numel)
                if early:
                    self._take_over_members(step.members, begin, end)
                reach(end)
            if early:
                self._take_over_states(group)
                if len(early) == len(begins):
                    step_nothing(step)
            if self._prefetch.is_over():  # gathers read the copies on another stream
                self.tiles.wait_copies()
        except Exception:
            self._step.note_failure()
            self._prefetch.drop()
            raise
        except BaseException:  # Ctrl-C: do not wait
            self._prefetch.stop()
            raise
        finally:
            empty_parameter(step.parameter, step.states[step.parameter], group)
        group.note_stepped()
        self._gradient_stream.note_factor(step.name, step.factor, step.parameter.dtype)
        self._step.note_stepped()

    def load_weights(
        self,
        name: str,
        members: Sequence[Member],
        source: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Replace a sub-group's master weights as a whole, and its members by them, rounded.

        Nothing is read from the store. `drain` waits for the writes, and raises their errors.

        Args:
            name: The sub-group.
            members: All of its parameters. Nothing in memory may be a copy of those with a key.
            source: Called with (offset, uint8 tensor); fills the tensor with the bytes from there.

        Raises:
            StoreError: The drive failed; some of the values are new.
        """
        group, store = self.groups.group(name), self.groups.store
        self.drain()
        for member in members:
            if member.key is not None:
                make_anew(store, member.key, member.numel * member.dtype.itemsize)
        if group.is_split:
            self.groups.load_halves(name, source)
            return
        make_anew(store, group.key(), group.numel * self.groups.master_dtype.itemsize)
        for begin in self.tiles.begins(group.numel):
            tile = self.tiles.take(name, begin, group.numel)
            try:
                weights = tile.master.narrow(0, 0, tile.numel)
                source(begin * weights.itemsize, weights.view(torch.uint8))
                self.tiles.write(tile, group.key(), weights)
                self._give_to_members(tile, members, is_cast=False)
            finally:
                self.tiles.retire(tile)

    def drain(self) -> None:
        """Wait until nothing is in flight; ends the current walk, if any.

        Raises:
            StoreError: A transfer failed; the others have been waited for.
        """
        self._prefetch.stop()
        self.tiles.drain()

    # -- early -----------------------------------------------------------------------------------

    def queue_early(self, name: str, begin: int) -> None:
        """Queue a tile for `step_early`. Any thread may call."""
        self._prefetch.queue_early(name, begin)

    def step_early(
        self,
        steps: Mapping[str, EarlyStep],
        acquire_gradient: Callable[[str, int], Lease],
    ) -> tuple[str, int]:
        """Step the next expected tile, and write its values beside the old ones.

        Returns (sub-group, first element).

        Args:
            steps: The steps, by sub-group.
            acquire_gradient: Returns the lease of the spare block with the gradient of a tile.

        Raises:
            StoreError: The drive failed.
        """
        with self._prefetch.next_tile() as tile:
            group = self.groups.group(tile.owner)
            step = steps[tile.owner]
            values: dict[str, Any] = {}
            self._point_states(tile, group, values)
            lease = acquire_gradient(tile.owner, tile.begin)
            gradient = lease.view(tile.numel, tile.raw.dtype)
            if group.steps_updates:
                update = self.tiles.gradient(tile).copy_(gradient).mul_(step.factor)
                self._step_by_update(
                    tile, group, partial(step_by_update, step.fused, values), update
                )
            else:
                self._step_fused(tile, group, step.fused, values, gradient, step.factor)
            lease.release()
            is_cast = group.is_split or not group.steps_updates
            self._write_back(tile, group, step.members, is_cast=is_cast, early=True)
            return tile.owner, tile.begin

    def step_next(
        self,
        members: Sequence[Member],
        fill: Callable[[int, torch.Tensor], None],
        apply: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Step the next queued tile by an update, and write its values beside the old ones.

        Args:
            members: All parameters of its sub-group, in the store.
            fill: Called with the tile's first element and its block of gradients, in their stored
                dtype, which it fills with the update.
            apply: Called with weights and update, both in the master weights' dtype; changes the
                weights.

        Raises:
            StoreError: The drive failed.
        """
        with self._prefetch.next_tile() as tile:
            raw, update = tile.raw.narrow(0, 0, tile.numel), self.tiles.gradient(tile)
            fill(tile.begin, raw)
            if update.data_ptr() != raw.data_ptr():
                update.copy_(raw)
            group = self.groups.group(tile.owner)
            self._step_by_update(tile, group, apply, update)
            self._write_back(tile, group, members, is_cast=group.is_split, early=True)

    def _take_over_members(self, members: Sequence[Member], begin: int, end: int) -> None:
        """Let members that end in [begin, end) of their sub-group take over their new values."""
        self._step.note_change()
        for member in members:
            if begin < member.offset + member.numel <= end:
                self._take_over_key(member.key)

    def _take_over_states(self, group: SubGroup) -> None:
        for key in group.all_keys:
            self._take_over_key(key)

    def _take_over_key(self, key: str | None) -> None:
        assert self._take_over is not None
        assert key is not None
        self._take_over(key=key, other=early_key(key))

    @contextmanager
    def _due(self, group: SubGroup, begin: int) -> Iterator[Tile]:
        """Give the next tile of the walk, which must be this one."""
        with self._prefetch.next_tile() as tile:
            if (tile.owner, tile.begin) != (group.name, begin):
                raise AssertionError(f"{group.name} is stepped out of the order of start()")
            yield tile

    # -- the optimizer's view --------------------------------------------------------------------

    def _point_states(self, tile: Tile, group: SubGroup, values: State) -> None:
        for number, (name, dtype) in enumerate(group.tile_states.items()):
            block = self.tiles.state(tile, number, dtype)
            if isinstance(values.get(name), torch.Tensor):
                values[name].data = block
            else:
                values[name] = block

    def _step_tile(
        self,
        tile: Tile,
        group: SubGroup,
        step: SubGroupStep,
        scalars: Mapping[str, Any],
        *,
        makes_states: bool,
    ) -> None:
        """Step a tile of the walk with the sub-group's scalar states, and start storing it."""
        values = step.states[step.parameter]
        if makes_states:
            values.clear()
        values.update(copy_scalars(scalars))
        if not makes_states:
            self._point_states(tile, group, values)
        fused = None if makes_states else step.fused
        if fused is not None and group.steps_updates:
            update = self._convert_gradient(tile, step.factor)
            self._step.note_change()
            self._step_by_update(tile, group, partial(step_by_update, fused, values), update)
        elif fused is not None:
            gradient, factor = self._gradient(tile, step.factor)
            self._step.note_change()
            self._step_fused(tile, group, fused, values, gradient, factor)
        elif group.is_split:
            raise AssertionError(f"{group.name} has its weights in halves, and no fused step")
        else:
            # Data first: torch refuses a gradient whose shape differs.
            if group.flag_state in group.states:
                clear_flags(values[group.flag_state])  # whole weights have no flags
            step.parameter.data = tile.master.narrow(0, 0, tile.numel)
            step.parameter.grad = self._convert_gradient(tile, step.factor)
            self._step.note_change()
            step.update()
            self._collect_states(tile, group, step.states[step.parameter])
        early = step.name in self._step.early
        is_cast = fused is not None and (group.is_split or not group.steps_updates)
        self._write_back(tile, group, step.members, is_cast=is_cast, early=early)

    def _step_fused(
        self,
        tile: Tile,
        group: SubGroup,
        fused: FusedUpdate,
        values: State,
        gradient: torch.Tensor,
        factor: float,
    ) -> None:
        """Step a tile in one pass."""
        weight = tile.master.narrow(0, 0, tile.numel)
        if group.is_split:
            weight = tile.low(group.low_bits.dtype)
        if group.form is MasterForm.EXACT and group.low_bits.has_flags:
            round_high(tile.high, weight, values[group.flag_state])
        fused(
            begin=tile.begin,
            gradient=gradient,
            factor=factor,
            weight=weight,
            values=values,
            scales=self.tiles.scales(tile) if group.coded else None,
            output=None if tile.cast is None else tile.cast.narrow(0, 0, tile.numel),
        )

    def _step_by_update(
        self,
        tile: Tile,
        group: SubGroup,
        apply: Callable[[torch.Tensor, torch.Tensor], None],
        update: torch.Tensor,
    ) -> None:
        """Step a tile with `apply`, which changes weights by updates, both in whole fp32 numbers.

        Weights in halves are joined in the tile's own memory, some after the other.
        """
        if not group.is_split:
            apply(tile.master.narrow(0, 0, tile.numel), update)
            return
        high, low, flags, room = tile.high, tile.low(group.low_bits.dtype), tile.flags, tile.joined
        for first in range(0, tile.numel, room.numel()):
            count = min(room.numel(), tile.numel - first)
            weight = room.narrow(0, 0, count)
            parts = high.narrow(0, first, count), low.narrow(0, first, count)
            bits = flags.narrow(0, flag_bytes(first), flag_bytes(count))
            read_flags = bits if group.has_bits and group.form is MasterForm.ROUNDED else None
            group.low_bits.join(*parts, read_flags, weight)
            apply(weight, update.narrow(0, first, count))
            group.low_bits.cut_rounded(weight, *parts, bits)

    def _gradient(self, tile: Tile, factor: Factor) -> tuple[torch.Tensor, float]:
        """Return a tile's gradient and its factor: as stored if it is complete, else converted."""
        gradient, multiplier = tile.raw.narrow(0, 0, tile.numel), as_number(factor)
        if multiplier is not None and self._gradient_stream.complete(
            tile.owner, tile.begin, gradient
        ):
            return gradient, multiplier
        return self._convert_gradient(tile, factor), 1.0

    def _convert_gradient(self, tile: Tile, factor: Factor) -> torch.Tensor:
        """Return a tile's gradient in the step's dtype, multiplied by `factor`."""
        gradient = self.tiles.gradient(tile)
        self._gradient_stream.convert(
            tile.owner, tile.begin, tile.raw.narrow(0, 0, tile.numel), gradient
        )
        return gradient.mul_(factor)

    def _collect_states(self, tile: Tile, group: SubGroup, values: State) -> None:
        """Copy states that the optimizer created, or moved, into the tile."""
        for name, value in values.items():
            if not is_state_tensor(name, value, tile.numel):
                continue
            if name not in group.states:
                self.groups.add_state(group.name, name, value.dtype)
            number = list(group.tile_states).index(name)
            block = self.tiles.state(tile, number, value.dtype)
            if value.data_ptr() != block.data_ptr():
                block.copy_(value)
                value.data = block

    def _write_back(
        self, tile: Tile, group: SubGroup, members: Sequence[Member], *, is_cast: bool, early: bool
    ) -> None:
        """Store a tile's new values; with `early`, beside the old ones."""
        key_of = early_key if early else str
        master = tile.low(group.low_bits.dtype) if group.is_split else tile.master
        self.tiles.write(tile, key_of(group.key()), master)
        for number, (name, dtype) in enumerate(group.tile_states.items()):
            self.tiles.write(tile, key_of(group.key(name)), self.tiles.state(tile, number, dtype))
        if group.has_bits:
            key = key_of(group.key(FLAGS))
            self.tiles.write_part(tile, key, tile.flags, flag_bytes(tile.begin))
        if group.tile_scales:
            self.tiles.write_scales(tile, key_of(group.key(SCALES)))
        self._give_to_members(tile, members, is_cast=is_cast, early=early)

    def _give_to_members(
        self, tile: Tile, members: Sequence[Member], *, is_cast: bool, early: bool = False
    ) -> None:
        """Write the tile's weights to members; with `is_cast`, `tile.cast` has them already."""
        for member in members:
            first, count = member.overlap(tile.begin, tile.numel)
            if count <= 0:
                continue
            source = tile.master.narrow(0, first - tile.begin, count)
            if is_cast and tile.cast is not None and member.dtype == tile.cast.dtype:
                source = tile.cast.narrow(0, first - tile.begin, count)
            is_in_host = member.tensor is not None and member.tensor.device.type == "cpu"
            if member.dtype != source.dtype and not is_in_host:
                # A casting copy to a device would allocate a host temporary.
                if tile.cast is None:
                    raise AssertionError(f"no room to cast {source.dtype} to {member.dtype}")
                source = tile.cast.narrow(0, first - tile.begin, count).copy_(source)
            if member.tensor is not None:
                target = member.tensor.narrow(0, first - member.offset, count)
                self.tiles.copy_part(tile, source, target)
                continue
            if member.key is None:
                raise AssertionError(f"a member at {member.offset} lives nowhere")
            offset_bytes = (first - member.offset) * source.element_size()
            key = early_key(member.key) if early else member.key
            self.tiles.write_part(tile, key, source, offset_bytes)
            if not early:  # an early value may be forgotten
                self._hand_over.fill(key, first - member.offset, source)
