"""The order of tiles in a walk, and the tiles being read ahead.

Knows the order of tiles and their reads; not the arithmetic of a step. While one tile is computed
the next ones are read, also from one sub-group to the next. The first tiles of a walk may be read
before it begins, when weights and states are final and gradients are not; their gradients are read
when it begins. If the walk begins at other tiles, or states were added or removed, the tiles are
read again. A caller that changes a value must call `drop_prefetched`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from memascend.errors import StoreError
from memascend.kernels.halves import flag_bytes
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.sub_group import FLAGS, SCALES, MasterForm, SubGroup
from memascend.streaming.optimizer.sub_groups import SubGroups
from memascend.streaming.optimizer.tile_memory import Tile, TileMemory

#: Identity of a tile's read: sub-group, form of its master weights, first element, states, values
#: that have not been written.
_Content = tuple[str, MasterForm, int, tuple[str, ...], tuple[str | None, ...]]


def _content(group: SubGroup, begin: int) -> _Content:
    return group.name, group.form, begin, tuple(group.tile_states), tuple(group.fills)


class TilePrefetch:
    """Tiles in the order in which they are stepped. One thread at a time may call."""

    def __init__(
        self, *, groups: SubGroups, tiles: TileMemory, gradient_stream: GradientStream
    ) -> None:
        """Start without a walk.

        Args:
            groups: The sub-groups of the tiles.
            tiles: Memory that they are read to.
            gradient_stream: Source of their gradients.
        """
        self._groups, self._tiles, self._gradient_stream = groups, tiles, gradient_stream
        self._coming: Iterator[tuple[SubGroup, int]] = iter(())
        self._early_coming: deque[tuple[SubGroup, int]] = deque()
        self._reading: deque[Tile] = deque()
        self._before_walk: list[_Content] = []  # tiles read for the next walk

    def start(self, names: Sequence[str], early: Mapping[str, frozenset[int]]) -> None:
        """Start a walk over sub-groups; gradients must be complete.

        Args:
            names: All sub-groups, in order.
            early: First elements of tiles that are skipped, by sub-group.
        """
        # Cleared first: after Ctrl-C below only some tiles have their gradients, so the next walk
        # must read all of them again.
        read, self._before_walk = self._before_walk, []
        self._early_coming.clear()
        coming = self._in_order(names, early)
        due = [_content(*tile) for tile in islice(coming, len(read))]
        if due != read or len(read) != len(self._reading):
            self.drop()
            coming = self._in_order(names, early)
        for tile in self._reading:
            self._read_gradient(tile)
        self._coming = coming

    def read_first(self, names: Sequence[str]) -> None:
        """Start reading the first tiles of the next walk; no effect while any tile is being read.

        Call `drop_prefetched` before weights or states change outside the walk.
        """
        if self._reading:
            return
        for group, begin in self._in_order(names, {}):
            if not self._tiles.has_idle():
                return
            try:
                self._read(group, begin)
            except StoreError:  # the walk reads it again, and raises the error
                return
            # After the read: Ctrl-C may leave a tile half read.
            self._before_walk.append(_content(group, begin))

    def drop_prefetched(self) -> None:
        """Drop tiles that were read for the next walk; tiles of a current walk stay."""
        if self._before_walk:
            self.drop()

    def queue_early(self, name: str, begin: int) -> None:
        """Queue a tile to be stepped early. Any thread may call."""
        self._early_coming.append((self._groups.group(name), begin))

    def stop(self) -> None:
        """End the walk; tiles being read are retired with their reads in flight."""
        self._coming = iter(())
        self._early_coming.clear()
        self._before_walk = []
        while self._reading:
            self._tiles.retire(self._reading.popleft())

    def drop(self) -> None:
        """End the walk after waiting for its reads; their errors are ignored."""
        for tile in self._reading:
            with suppress(StoreError):
                tile.transfers.wait()
        self.stop()

    def is_over(self) -> bool:
        """Return whether the walk has no tile left."""
        return not self._reading

    @contextmanager
    def next_tile(self) -> Iterator[Tile]:
        """Give the next tile after waiting for its read; start reading those after it."""
        self._read_next(1)
        tile = self._reading.popleft()
        try:
            self._read_next(int(self._tiles.has_retired()))
            tile.transfers.wait()
            yield tile
        finally:
            self._tiles.retire(tile)

    def _read_next(self, count_min: int) -> None:
        """Start reading tiles while any is idle; wait for idle ones until `count_min` are read."""
        while self._tiles.has_idle() or len(self._reading) < count_min:
            following = next(self._coming, None)
            is_early = following is None
            if is_early and self._early_coming:
                following = self._early_coming.popleft()
            if following is None:
                return
            tile = self._read(*following)
            if not is_early:
                self._read_gradient(tile)

    def _in_order(
        self, names: Sequence[str], early: Mapping[str, frozenset[int]]
    ) -> Iterator[tuple[SubGroup, int]]:
        """Yield (sub-group, first element) of the tiles of a walk."""
        return (
            (group, begin)
            for group in map(self._groups.group, names)
            for begin in self._tiles.begins(group.numel)
            if begin not in early.get(group.name, ())
        )

    def _read(self, group: SubGroup, begin: int) -> Tile:
        """Start reading the weights and states of a tile."""
        tile = self._tiles.take(group.name, begin, group.numel)
        self._reading.append(tile)
        self._read_master(tile, group)
        for number, (name, dtype) in enumerate(group.tile_states.items()):
            block = self._tiles.state(tile, number, dtype)
            if name in group.fills:
                block.fill_(group.fills[name])
            else:
                self._tiles.read(tile, group.key(name), block)
        if group.tile_scales and SCALES in group.fills:
            self._tiles.scales(tile).fill_(group.fills[SCALES])
        elif group.tile_scales:
            self._tiles.read_scales(tile, group.key(SCALES))
        return tile

    def _read_master(self, tile: Tile, group: SubGroup) -> None:
        if not group.is_split:
            self._tiles.read(tile, group.key(), tile.master)
            return
        low = tile.low(group.low_bits.dtype)
        if None in group.fills:
            low.fill_(int(group.fills[None]))
        else:
            self._tiles.read(tile, group.key(), low)
        if group.form is MasterForm.ROUNDED and FLAGS in group.fills:
            tile.flags.fill_(int(group.fills[FLAGS]))
        elif group.form is MasterForm.ROUNDED and group.has_bits:
            self._tiles.read_part(tile, group.key(FLAGS), tile.flags, flag_bytes(tile.begin))
        for key, offset_bytes, count, first in group.high_runs(tile.begin, tile.numel):
            self._tiles.read_part(tile, key, tile.high.narrow(0, first, count), offset_bytes)

    def _read_gradient(self, tile: Tile) -> None:
        raw = tile.raw.narrow(0, 0, tile.numel)
        for ticket in self._gradient_stream.start_read(
            tile.owner, tile.begin, raw, hold=tile.memory
        ):
            tile.add(ticket)
