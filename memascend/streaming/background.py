"""The optimizer's walk in the background: its progress, and waiting for it.

Knows names of values and the order in which they are written; neither tensors nor the drive. The
steps run in order on a thread of their own. A reader of a value waits until that value is written;
a caller that changes the walk's inputs waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

#: Steps one sub-group; calls back with the number of its leading elements that are new so far.
QueuedStep = Callable[[Callable[[int], None]], None]
#: End of a value: the index of its step, and the element in that step.
WalkPoint = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Course:
    """One walk: the ends of its values, and its progress.

    Plain fields instead of a `Future`: `Future.cancel()` enters its lock in Python, and a second
    Ctrl-C there can leave it locked, so that the walk's thread waits for ever.
    """

    points: Mapping[str, WalkPoint]
    reached: WalkPoint = (0, 0)
    has_begun: bool = False
    is_withdrawn: bool = False
    is_over: bool = False
    error: BaseException | None = None

    def has_passed(self, name: str) -> bool:
        point = self.points.get(name)
        return point is None or point <= self.reached


class BackgroundStep:
    """Runs steps in the background, one walk at a time. One thread starts; any may wait."""

    def __init__(self, use_device: Callable[[], object] = int) -> None:
        """Start without a walk.

        Args:
            use_device: Makes the device current on the thread that the steps run on.
        """
        self.use_device = use_device
        self._waited_s = 0.0
        self._changed = threading.Condition()
        self._course: _Course | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def waited_s(self) -> float:
        """Seconds that threads have waited for values or for the end of a walk."""
        return self._waited_s

    @property
    def is_under_way(self) -> bool:
        """Whether a walk was started and not finished by `finish`."""
        return self._course is not None

    def start(
        self,
        steps: Sequence[QueuedStep],
        points: Mapping[str, WalkPoint],
        end: Callable[[], object],
    ) -> None:
        """Start a walk; the one before must have been finished.

        Args:
            steps: In order.
            points: End of each value that the walk writes, by name.
            end: Called after the last step, or after the one that failed.

        Raises:
            RuntimeError: No thread could be started; the walk has not begun.
        """
        if self._course is not None:
            raise AssertionError("the walk before was not finished")
        thread = self._get_thread()
        course = _Course(points)
        try:
            self._course = course
            thread.submit(self._run, course, steps, end)
        except BaseException:  # Ctrl-C, too: no thread may wait for a walk that never begins
            # No function calls here: a second Ctrl-C could come after one. Write is_withdrawn
            # before reading has_begun; _run() does the reverse.
            course.is_withdrawn = True
            if not course.has_begun:
                self._course = None
            raise

    def run(self, function: Callable[[], None]) -> Future[None]:
        """Queue a function on the walk's thread, for a tile that is stepped before its walk.

        Raises:
            RuntimeError: No thread could be started.
        """
        return self._get_thread().submit(function)

    def has_passed(self, name: str) -> bool:
        """Return whether a value is new, or not written by the walk."""
        course = self._course
        return course is None or course.has_passed(name)

    def wait_for(self, names: Iterable[str]) -> None:
        """Wait until all these values are new.

        Raises:
            StoreError: The walk failed before it wrote them; other errors of its steps likewise.
        """
        course = self._course
        if course is None:
            return
        awaited = [name for name in names if not course.has_passed(name)]
        if not awaited:
            return
        self._wait_until(lambda: course.is_over or all(map(course.has_passed, awaited)))
        if course.error is not None and not all(map(course.has_passed, awaited)):
            raise course.error

    def finish(self) -> None:
        """Wait until the walk is over; Ctrl-C ends the wait, not the walk.

        Raises:
            StoreError: The walk failed; other errors of its steps likewise. Raised once.
        """
        course = self._course
        if course is None:
            return
        self._wait_until(lambda: course.is_over)
        with self._changed:
            if self._course is not course:
                return  # another thread has finished it
            self._course = None
        if course.error is not None:
            raise course.error

    def close(self) -> None:
        """End the thread, after all functions queued on it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        started_s = monotonic()
        with self._changed:
            try:
                self._changed.wait_for(condition)
            finally:
                self._waited_s += monotonic() - started_s

    def _get_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            # One thread for all walks: each thread has a stack and its own OpenMP threads.
            self._thread = ThreadPoolExecutor(1, "memascend-optimizer")
        return self._thread

    def _run(self, course: _Course, steps: Sequence[QueuedStep], end: Callable[[], object]) -> None:
        def reach(point: WalkPoint) -> None:
            with self._changed:
                course.reached = point
                self._changed.notify_all()

        # Write has_begun before reading is_withdrawn; start() does the reverse, so at least one of
        # them sees the other.
        course.has_begun = True
        try:
            if course.is_withdrawn:
                return
            self.use_device()
            for index, step in enumerate(steps):
                step(lambda numel, index=index: reach((index, numel)))  # type: ignore[misc]
                reach((index + 1, 0))
            end()
        except BaseException as error:  # raised by the threads that wait
            course.error = error
            with suppress(Exception):  # the first error is the one to raise
                end()
        finally:
            with self._changed:
                course.is_over = True
                self._changed.notify_all()
