"""Steps made early: tiles of the coming optimizer step, while gradients still arrive.

Knows when the gradient of a tile is complete, and a thread that steps such tiles one after the
other; neither what a step computes nor where the bytes lie. Nothing that was early is the step's
until the step takes it: new values go beside the old ones, so that whatever decides against them (a
norm that is not finite, another learning rate, an error in backward) has only to forget them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from memascend.streaming.optimizer import OptimizerStream
from memascend.streaming.updates import EarlyStep

#: Begins of tiles by sub-group.
Begins = Mapping[str, frozenset[int]]


class _Coverage:
    """Of one sub-group, the tiles whose gradients are not complete."""

    def __init__(self, begins: range, places: Iterable[tuple[int, int]]) -> None:
        """Expect all.

        Args:
            begins: Of its tiles.
            places: Offset and elements of each gradient.
        """
        self._begins = begins
        self._numel = dict(places)
        self._missing = dict.fromkeys(begins, 0)
        for offset in self._numel:
            for begin in self._tiles_of(offset):
                self._missing[begin] += 1

    def note(self, offset: int) -> list[int] | None:
        """Return what a gradient completes; None when it is not expected, or not any more."""
        if offset not in self._numel:
            return None
        begins = self._tiles_of(offset)
        del self._numel[offset]
        for begin in begins:
            self._missing[begin] -= 1
        return [begin for begin in begins if self._missing[begin] == 0]

    def _tiles_of(self, offset: int) -> range:
        tile_numel = self._begins.step
        end = offset + self._numel[offset]
        return range(offset // tile_numel * tile_numel, end, tile_numel)


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """One sub-group that may be stepped early, and where its gradients lie in it."""

    step: EarlyStep
    begins: range
    places: Sequence[tuple[int, int]]


class EarlySteps:
    """Tiles stepped early, of one step at a time. One thread calls; another one steps."""

    def __init__(
        self,
        *,
        stream: OptimizerStream,
        is_stored: Callable[[str, int], bool],
        run: Callable[[Callable[[], None]], Future[None]],
    ) -> None:
        """Begin with nothing to step.

        Args:
            stream: Steps tiles.
            is_stored: Whether the gradients of a tile may be read.
            run: Runs a function on the thread that steps, each behind the one before.
        """
        self._stream = stream
        self._is_stored = is_stored
        self._run = run
        self._steps: dict[str, EarlyStep] = {}
        self._coverage: dict[str, _Coverage] = {}
        self._complete: deque[tuple[str, int]] = deque()  # gradients may be on their way to it
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
        self._is_open = bool(parts)

    def note(self, name: str, offset: int) -> None:
        """Note that a gradient is final; tiles that are complete by it are stepped soon.

        One that comes twice is of another backward pass: then nothing was early.
        """
        if not self._is_open or name not in self._coverage:
            return
        begins = self._coverage[name].note(offset)
        if begins is None:
            self.forget()
            return
        self._complete += [(name, begin) for begin in begins]
        while self._is_open and self._complete and self._is_stored(*self._complete[0]):
            self._stream.expect_early(*self._complete.popleft())
            self._is_running = True
            try:
                self._run(self._step_next)
            except RuntimeError as error:  # no thread: nobody needs these steps
                self._fail(error)

    def close(self) -> None:
        """Step nothing more, and return when nothing is in flight."""
        self._is_open = False
        self._complete.clear()
        if self._is_running:
            # Behind all tiles, whichever of them Ctrl-C has let this thread know of.
            with suppress(RuntimeError):
                self._run(_do_nothing).result()
            self._is_running = False
            try:
                self._stream.drain()
            except Exception as error:  # of a write: what it was to hold is worth nothing
                self._fail(error)

    def take(self) -> tuple[Begins, Exception | None]:
        """Return what was stepped early, or the error that spoilt it, once; closed before."""
        done, error = self._done, self._error
        self._done, self._error = {}, None
        if error is not None:
            return {}, error
        return {name: frozenset(begins) for name, begins in done.items()}, None

    def forget(self) -> None:
        """Forget what was early; errors, too."""
        self.close()
        self.take()
        self._steps, self._coverage = {}, {}

    def _step_next(self) -> None:
        """Step the tile that is due; nothing once this is closed or something has failed."""
        if not self._is_open:
            return
        try:
            name, begin = self._stream.step_early(self._steps)
            self._done.setdefault(name, set()).add(begin)
        except Exception as error:  # told to whoever takes the rest
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self._error = self._error or error
        self.has_failed = True


def _do_nothing() -> None:
    """Stand for the end of what was begun before."""
