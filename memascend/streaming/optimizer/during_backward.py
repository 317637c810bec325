"""Early steps: tiles of the coming optimizer step are stepped during backward.

Knows when the gradient of a tile is complete, and the thread that steps such tiles in order;
neither the arithmetic of a step nor where the bytes are stored. New values are written beside the
old ones until the step takes them over, so that after a norm that is not finite, or an error in
backward, it is enough to drop them.

The gradients of a tile are copied into a block of host memory, not to the drive: the step consumes
them. A tile holds a block while it waits for the rest of its gradients or for the drive. If no
block is free, the caller waits for a tile that is being stepped. If none becomes free even so, or
the tile is reserved for step(), its gradients are written to the drive. If the early steps are a
guess, all gradients are written to the drive too, and a wrong guess costs nothing but time.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from memascend.base.interfaces import Event, Ticket
from memascend.base.waiting import CopyTicket, event_here
from memascend.memory.pool import Lease
from memascend.streaming.background import BackgroundStep
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.streaming.optimizer.step import Begins
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_group_step import EarlyStep
from memascend.transfer.pending import Pending

#: Called with a sub-group, the offset of a gradient in it, the first element of a part, the part.
PutBack = Callable[[str, int, int, torch.Tensor], None]


class _Coverage:
    """One sub-group: the gradients that have not arrived, and the missing elements per tile."""

    def __init__(self, begins: range, ranges: Sequence[tuple[int, int]]) -> None:
        """Start with every gradient missing.

        Args:
            begins: First element of each tile.
            ranges: Offset and number of elements of each gradient.
        """
        self._begins = begins
        self._offsets = {offset for offset, _ in ranges}
        self._missing = Counter[int]()
        for offset, numel in ranges:
            for begin in _tiles_of(offset, numel, begins.step):
                end = min(begin + begins.step, offset + numel)
                self._missing[begin] += end - max(begin, offset)

    def note_arrival(self, offset: int) -> bool:
        """Note that a gradient arrives; return whether this is the first time."""
        is_first = offset in self._offsets
        self._offsets.discard(offset)
        return is_first

    def fill(self, begin: int, numel: int) -> bool:
        """Note that `numel` elements of a tile arrived; return whether the tile is complete."""
        self._missing[begin] -= numel
        return self._missing[begin] == 0

    def is_all_missing(self, begin: int) -> bool:
        """Return whether gradients are still to fill every element of a tile."""
        return self._missing[begin] == min(self._begins.step, self._begins.stop - begin)


def _tiles_of(offset: int, numel: int, tile_numel: int) -> range:
    return range(offset // tile_numel * tile_numel, offset + numel, tile_numel)


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """One sub-group that may be stepped early, and the ranges of its gradients.

    Attributes:
        step: The step of the sub-group.
        begins: First element of each tile.
        ranges: Offset and number of elements of each expected gradient.
        kept: The same for gradients that must go to the drive.
        left: First elements of tiles that are not stepped early.
    """

    step: EarlyStep
    begins: range
    ranges: Sequence[tuple[int, int]]
    kept: Sequence[tuple[int, int]] = ()
    left: frozenset[int] = frozenset()

    def left_tiles(self) -> list[tuple[str, int]]:
        """Return the tiles that are not stepped early: (sub-group, first element)."""
        left = [*self.left]
        for offset, numel in self.kept:
            left += _tiles_of(offset, numel, self.begins.step)
        return [(self.step.name, begin) for begin in left]


def leave_some(parts: Sequence[EarlyPart], count: int) -> list[EarlyPart]:
    """Leave every `count`-th tile to the step, counted over all sub-groups."""
    number = itertools.count(1)

    def choose(begins: range) -> frozenset[int]:
        return frozenset(begin for begin in begins if next(number) % count == 0)

    return [replace(part, left=choose(part.begins)) for part in parts]


@dataclass(slots=True, eq=False)
class _TileGradient:
    """The gradient of one tile, as far as it has arrived."""

    name: str
    begin: int
    lease: Lease
    block: torch.Tensor
    copies: Pending[Ticket] = field(default_factory=Pending)  # into the block
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset, begin, elements

    def part(self, begin: int, count: int) -> torch.Tensor:
        """Return `count` elements of the block, from element `begin` of the sub-group on."""
        return self.block.narrow(0, begin - self.begin, count)


class _Expected:
    """The gradients and tiles of one coming step."""

    def __init__(self, parts: Sequence[EarlyPart]) -> None:
        self.steps = {part.step.name: part.step for part in parts}
        self.coverage = {part.step.name: _Coverage(part.begins, part.ranges) for part in parts}
        #: Gradients that go to the drive: sub-group and offset.
        self.kept = {(part.step.name, offset) for part in parts for offset, _ in part.kept}
        #: Tiles that are not stepped early: sub-group and first element.
        self.left = {tile for part in parts for tile in part.left_tiles()}


class TilesDuringBackward:
    """Steps tiles of one coming optimizer step early. One thread calls; another one steps."""

    def __init__(
        self,
        *,
        stream: OptimizerStream,
        background: BackgroundStep,
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        """Start closed; `expect` opens it.

        Args:
            stream: Steps tiles.
            background: Has the stepping thread.
            new_event: Makes an event of the device; None when the device is the CPU.
        """
        self._stream = stream
        self._background, self._new_event = background, new_event
        self._expected = _Expected(())
        self._waiting: dict[tuple[str, int], _TileGradient] = {}  # by tile, until it is stepped
        self._filled: list[tuple[_TileGradient, int]] = []  # and elements: copies not noted yet
        self._running: deque[Future[None]] = deque()
        self._done: dict[str, set[int]] = {}
        self._is_running = False  # functions may be queued on the thread
        self._is_open = False  # gradients are taken, and complete tiles stepped
        self._keeps_gradients = False
        self._error: Exception | None = None
        #: Whether an early step failed; the keys for new values may be unreadable since then.
        self.has_failed = False

    def expect(self, parts: Sequence[EarlyPart], *, keeps_gradients: bool = False) -> None:
        """Expect the gradients of these sub-groups, and drop all earlier early steps.

        Args:
            parts: The sub-groups.
            keeps_gradients: Write their gradients to the drive, too.
        """
        self.drop()
        self._expected = _Expected(parts)
        self._keeps_gradients = keeps_gradients
        if parts:
            self._is_open = True
            self._drain()  # tiles of a walk that Ctrl-C ended before its first tile
            self._start(_do_nothing)  # if there is no thread the drive takes the gradients

    def bypass_of(self, name: str, offset: int) -> DriveBypass | None:
        """Return where to copy a gradient that is about to arrive; None: write it to the drive.

        A gradient that arrives twice belongs to another backward pass: then all early steps are
        dropped.
        """
        expected = self._expected
        is_known = name in expected.coverage and (name, offset) not in expected.kept
        if not self._is_open or not is_known:
            return None
        if not expected.coverage[name].note_arrival(offset):
            self.drop()
            return None
        return DriveBypass(
            offset=offset,
            tile_numel=self._stream.tiles.shape.numel,
            find=functools.partial(self._find, name, offset),
            is_kept=self._keeps_gradients,
        )

    def note_copied(self) -> None:
        """Note that gradients were copied into blocks, and queue the tiles that are complete."""
        filled, self._filled = self._filled, []
        event = event_here(self._new_event) if filled else None
        for gradient, numel in filled:
            if event is not None:
                copy = CopyTicket(event)
                gradient.copies.add(copy, copy)
            coverage = self._expected.coverage
            if self._is_open and coverage[gradient.name].fill(gradient.begin, numel):
                self._stream.queue_early(gradient.name, gradient.begin)
                self._start(self._step_next)

    def finish(self) -> None:
        """Step all complete tiles, and return when nothing is in flight.

        `close` would drop tiles that are queued for the thread. The step would then read their
        gradients from the drive, where they would have to be written first.
        """
        if self._is_open:
            self._wait_for_thread()
        self.close()

    def close(self) -> None:
        """Stop stepping, and return when nothing is in flight."""
        self._is_open = False
        if self._is_running:
            self._wait_for_thread()
            self._is_running = False
            self._running.clear()
            self._drain()

    def take_results(self, put_back: PutBack) -> tuple[Begins, Exception | None]:
        """Return the tiles that were stepped early, or the error that prevented it, once.

        Call `close` first.

        Args:
            put_back: Called with each part of a gradient whose tile was not stepped.
        """
        for gradient in self._waiting.values():
            gradient.copies.wait()
            for offset, begin, count in gradient.parts:
                put_back(gradient.name, offset, begin, gradient.part(begin, count))
        self._clear()
        done, error = self._done, self._error
        self._done, self._error = {}, None
        if error is not None:
            return {}, error
        return {name: frozenset(begins) for name, begins in done.items()}, None

    def drop(self) -> None:
        """Drop all early steps, and their error."""
        self.close()
        self._clear()
        self._done, self._error = {}, None
        self._expected = _Expected(())

    def _clear(self) -> None:
        """Release the blocks of all tiles that were not stepped."""
        self._filled = []
        for gradient in [*self._waiting.values()]:
            gradient.copies.wait()  # if Ctrl-C ends the wait, the next call releases the block
            del self._waiting[gradient.name, gradient.begin]
            gradient.lease.release()

    # -- the caller's thread -----------------------------------------------------------------------

    def _find(self, name: str, offset: int, begin: int, count: int) -> torch.Tensor | None:
        """Return the block's part for [begin, begin+count) of the sub-group; None: to the drive."""
        self.note_copied()  # the parts before
        tile_numel = self._stream.tiles.shape.numel
        tile = (name, begin // tile_numel * tile_numel)
        if not self._is_open or tile in self._expected.left:
            return None
        gradient = self._waiting.get(tile)
        if gradient is None:
            lease = self._acquire_block()
            if lease is None:
                self._expected.left.add(tile)
                return None
            block = lease.view(tile_numel, self._stream.tiles.shape.gradient_dtype)
            gradient = self._waiting[tile] = _TileGradient(*tile, lease, block)
            if not self._expected.coverage[name].is_all_missing(tile[1]):
                block.zero_()
        gradient.parts.append((offset, begin, count))
        self._filled.append((gradient, count))
        return gradient.part(begin, count)

    def _acquire_block(self) -> Lease | None:
        """Lease a free block, or wait for a tile being stepped; None when all tiles wait."""
        lease = self._stream.tiles.acquire_spare()
        while lease is None and self._running:
            self._running.popleft().result()
            lease = self._stream.tiles.acquire_spare()
        return lease

    def _wait_for_thread(self) -> None:
        # Runs after all queued tiles, also those whose future was lost by Ctrl-C.
        with suppress(RuntimeError):
            self._background.run(_do_nothing).result()

    def _drain(self) -> None:
        try:
            self._stream.drain()
        except Exception as error:  # a write failed: its key is undefined
            self._fail(error)

    def _start(self, function: Callable[[], None]) -> None:
        self._is_running = True
        while self._running and self._running[0].done():
            self._running.popleft()
        try:
            self._running.append(self._background.run(function))
        except RuntimeError as error:  # no thread: the walk steps these tiles
            self._fail(error)

    # -- the thread that steps ---------------------------------------------------------------------

    def _step_next(self) -> None:
        """Step the next expected tile; do nothing once closed, or after a failure."""
        if not self._is_open:
            return
        try:
            self._background.use_device()
            name, begin = self._stream.step_early(self._expected.steps, self._acquire_gradient)
            self._done.setdefault(name, set()).add(begin)
        except Exception as error:  # returned by take_results()
            self._fail(error)

    def _acquire_gradient(self, name: str, begin: int) -> Lease:
        """Hand the lease of a complete tile's block over."""
        self._waiting[name, begin].copies.wait()
        return self._waiting.pop((name, begin)).lease

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self._error = self._error or error
        self.has_failed = True


def _do_nothing() -> None:
    """Mark a point in the thread's queue: its future is done when all functions before it are."""
