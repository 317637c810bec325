"""Steps made early: tiles of the coming optimizer step, while gradients still arrive.

Knows when the gradient of a tile is complete, and a thread that steps such tiles one after the
other; neither what a step computes nor where the bytes lie. Nothing that was early is the step's
until the step takes it: new values go beside the old ones, so that whatever decides against them (a
norm that is not finite, an error in backward) has only to forget them.

A gradient goes to memory of its tile, and nowhere else: the step uses it up. As long as a tile
waits for the rest of its gradients, or for the drive, it has a block; where there is none backward
waits for a tile that is being stepped. A tile that gets none even so is not early, nor is one that
is left to the step: what comes for it goes to the drive.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from memascend.base.interfaces import Event, Ticket
from memascend.base.waiting import CopyTicket, event_here, wait_all
from memascend.streaming.optimizer import OptimizerStream
from memascend.streaming.tiles import Tiles
from memascend.streaming.updates import EarlyStep
from memascend.streaming.window import TilePlaces

#: Begins of tiles by sub-group.
Begins = Mapping[str, frozenset[int]]
#: Called with a sub-group, the offset of a gradient in it, the first element of a part, and that.
BringBack = Callable[[str, int, int, torch.Tensor], None]


class _Coverage:
    """Of one sub-group, the gradients that have not come, and the elements that tiles lack."""

    def __init__(self, begins: range, places: Sequence[tuple[int, int]]) -> None:
        """Expect all.

        Args:
            begins: Of its tiles.
            places: Offset and elements of each gradient.
        """
        self._begins = begins
        self._offsets = {offset for offset, _ in places}
        self._missing = Counter[int]()
        for offset, numel in places:
            for begin in _tiles_of(offset, numel, begins.step):
                end = min(begin + begins.step, offset + numel)
                self._missing[begin] += end - max(begin, offset)

    def take(self, offset: int) -> bool:
        """Note that a gradient comes; return whether it is the first time."""
        is_first = offset in self._offsets
        self._offsets.discard(offset)
        return is_first

    def fill(self, begin: int, numel: int) -> bool:
        """Note elements of a tile; return whether they complete it."""
        self._missing[begin] -= numel
        return self._missing[begin] == 0

    def is_all_missing(self, begin: int) -> bool:
        """Return whether gradients are to fill a tile from one end to the other."""
        return self._missing[begin] == min(self._begins.step, self._begins.stop - begin)


def _tiles_of(offset: int, numel: int, tile_numel: int) -> range:
    return range(offset // tile_numel * tile_numel, offset + numel, tile_numel)


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """One sub-group that may be stepped early, and where its gradients lie in it.

    Attributes:
        step: What is done to it.
        begins: Of its tiles.
        places: Offset and elements of each gradient that comes.
        kept: Offset and elements of those that are to go to the drive, wherever they lie.
        left: Begins of tiles that are not stepped early.
    """

    step: EarlyStep
    begins: range
    places: Sequence[tuple[int, int]]
    kept: Sequence[tuple[int, int]] = ()
    left: frozenset[int] = frozenset()

    def late_tiles(self) -> list[tuple[str, int]]:
        """Return the tiles that are not stepped early: name and begin."""
        late = [*self.left]
        for offset, numel in self.kept:
            late += _tiles_of(offset, numel, self.begins.step)
        return [(self.step.name, begin) for begin in late]


def leave_some(parts: Sequence[EarlyPart], count: int) -> list[EarlyPart]:
    """Leave one of so many tiles to the step, everywhere alike."""
    number = itertools.count(1)

    def choose(begins: range) -> frozenset[int]:
        return frozenset(begin for begin in begins if next(number) % count == 0)

    return [replace(part, left=choose(part.begins)) for part in parts]


@dataclass(slots=True, eq=False)
class _TileGradient:
    """The gradient of one tile, as far as it has come."""

    name: str
    begin: int
    block: torch.Tensor
    copies: list[Ticket] = field(default_factory=list)
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # offset, begin, elements

    def wait(self) -> None:
        """Return when all copies into it are over."""
        wait_all([copy.wait for copy in self.copies])
        self.copies = []

    def part(self, begin: int, count: int) -> torch.Tensor:
        """Return elements of it, counted in the sub-group."""
        return self.block.narrow(0, begin - self.begin, count)


class EarlySteps:
    """Tiles stepped early, of one step at a time. One thread calls; another one steps."""

    def __init__(
        self,
        *,
        stream: OptimizerStream,
        tiles: Tiles,
        run: Callable[[Callable[[], None]], Future[None]],
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        """Begin with nothing to step.

        Args:
            stream: Steps tiles.
            tiles: Its tiles.
            run: Runs a function on the thread that steps, each behind the one before.
            new_event: Makes an event of the device; None when the device is the CPU.
        """
        self._stream, self._tiles = stream, tiles
        self._run, self._new_event = run, new_event
        self._steps: dict[str, EarlyStep] = {}
        self._coverage: dict[str, _Coverage] = {}
        self._kept: set[tuple[str, int]] = set()  # sub-group and offset of gradients
        self._late: set[tuple[str, int]] = set()  # sub-group and begin of tiles
        self._waiting: dict[tuple[str, int], _TileGradient] = {}  # of tiles that are not stepped
        self._filled: list[tuple[_TileGradient, int]] = []  # elements: copies that are not noted
        self._running: deque[Future[None]] = deque()
        self._done: dict[str, set[int]] = {}
        self._is_running = False
        self._is_open = False
        self._error: Exception | None = None
        #: Whether something failed; what was to hold new values may be unreadable since.
        self.has_failed = False

    def begin(self, parts: Sequence[EarlyPart]) -> None:
        """Expect the gradients of these sub-groups. What was early before is forgotten."""
        self.forget()
        self._steps = {part.step.name: part.step for part in parts}
        self._coverage = {part.step.name: _Coverage(part.begins, part.places) for part in parts}
        self._kept = {(part.step.name, offset) for part in parts for offset, _ in part.kept}
        self._late = {tile for part in parts for tile in part.late_tiles()}
        if parts:
            self._is_open = True
            self._drain()  # of a walk that Ctrl-C ended before its first tile
            self._start(_do_nothing)  # if there is no thread the drive takes the gradients

    def places(self, name: str, offset: int) -> TilePlaces | None:
        """Return where a gradient goes that is about to come; None: to the drive.

        One that comes twice is of another backward pass: then nothing was early.
        """
        is_known = name in self._coverage and (name, offset) not in self._kept
        if not self._is_open or not is_known:
            return None
        if not self._coverage[name].take(offset):
            self.forget()
            return None
        return TilePlaces(
            offset=offset,
            tile_numel=self._tiles.shape.numel,
            find=functools.partial(self._find, name, offset),
        )

    def note(self) -> None:
        """Note that what came has been copied; tiles that are complete by it are stepped soon."""
        filled, self._filled = self._filled, []
        event = event_here(self._new_event) if filled else None
        for gradient, numel in filled:
            if event is not None:
                gradient.copies.append(CopyTicket(event))
            if self._is_open and self._coverage[gradient.name].fill(gradient.begin, numel):
                self._stream.expect_early(gradient.name, gradient.begin)
                self._start(self._step_next)

    def finish(self) -> None:
        """Step what is complete, and return when nothing is in flight.

        `close` would leave tiles that wait for the thread to the step, which reads their gradients
        from the drive: they would go there first.
        """
        if self._is_open:
            self._wait_for_thread()
        self.close()

    def close(self) -> None:
        """Step nothing more, and return when nothing is in flight."""
        self._is_open = False
        if self._is_running:
            self._wait_for_thread()
            self._is_running = False
            self._running.clear()
            self._drain()

    def take(self, bring_back: BringBack) -> tuple[Begins, Exception | None]:
        """Return what was stepped early, or the error that spoilt it, once; closed before.

        Args:
            bring_back: Given each part of a gradient whose tile was not stepped.
        """
        for gradient in self._waiting.values():
            gradient.wait()
            for offset, begin, count in gradient.parts:
                bring_back(gradient.name, offset, begin, gradient.part(begin, count))
        self._clear()
        done, error = self._done, self._error
        self._done, self._error = {}, None
        if error is not None:
            return {}, error
        return {name: frozenset(begins) for name, begins in done.items()}, None

    def forget(self) -> None:
        """Forget what was early; errors, too."""
        self.close()
        self._clear()
        self._done, self._error = {}, None
        self._steps, self._coverage = {}, {}

    def _clear(self) -> None:
        """Give the blocks of all tiles back that were not stepped."""
        self._filled = []
        for gradient in [*self._waiting.values()]:
            gradient.wait()  # Ctrl-C may end it, and leaves the block to the next call
            del self._waiting[gradient.name, gradient.begin]
            self._tiles.give_spare(gradient.block)

    # -- the caller's thread -----------------------------------------------------------------------

    def _find(self, name: str, offset: int, begin: int, count: int) -> torch.Tensor | None:
        """Return where a part of a gradient goes, counted in the sub-group; None: to the drive."""
        self.note()  # the parts before
        tile_numel = self._tiles.shape.numel
        tile = (name, begin // tile_numel * tile_numel)
        if not self._is_open or tile in self._late:
            return None
        gradient = self._waiting.get(tile)
        if gradient is None:
            block = self._take_block()
            if block is None:
                self._late.add(tile)
                return None
            gradient = self._waiting[tile] = _TileGradient(*tile, block)
            if not self._coverage[name].is_all_missing(tile[1]):
                block.zero_()
        gradient.parts.append((offset, begin, count))
        self._filled.append((gradient, count))
        return gradient.part(begin, count)

    def _take_block(self) -> torch.Tensor | None:
        """Return a block, if need be of a tile that is being stepped; None when all wait."""
        block = self._tiles.take_spare()
        while block is None and self._running:
            self._running.popleft().result()
            block = self._tiles.take_spare()
        return block

    def _wait_for_thread(self) -> None:
        # Behind all tiles, whichever of them Ctrl-C has let this thread know of.
        with suppress(RuntimeError):
            self._run(_do_nothing).result()

    def _drain(self) -> None:
        try:
            self._stream.drain()
        except Exception as error:  # of a write: what it was to hold is worth nothing
            self._fail(error)

    def _start(self, function: Callable[[], None]) -> None:
        self._is_running = True
        while self._running and self._running[0].done():
            self._running.popleft()
        try:
            self._running.append(self._run(function))
        except RuntimeError as error:  # no thread: nobody needs these steps
            self._fail(error)

    # -- the thread that steps ---------------------------------------------------------------------

    def _step_next(self) -> None:
        """Step the tile that is due; nothing once this is closed or something has failed."""
        if not self._is_open:
            return
        try:
            name, begin = self._stream.step_early(self._steps, self._take_gradient)
            self._done.setdefault(name, set()).add(begin)
        except Exception as error:  # told to whoever takes the rest
            self._fail(error)

    def _take_gradient(self, name: str, begin: int) -> torch.Tensor:
        """Return the block of a complete tile, which has it from now on."""
        self._waiting[name, begin].wait()
        return self._waiting.pop((name, begin)).block

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self._error = self._error or error
        self.has_failed = True


def _do_nothing() -> None:
    """Stand for the end of what was begun before."""
