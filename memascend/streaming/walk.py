"""The optimizer's walk while it goes on behind the caller: how far it is, and who waits for it.

Knows names of values and the order in which they become new; neither tensors nor the drive. The
steps run on a thread of their own, one after the other. Whoever wants a value waits until it is
new, and no longer; whoever changes what the walk works with waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

#: One sub-group's part; calls back with the elements that are new so far, counted from its start.
Step = Callable[[Callable[[int], None]], None]
#: Where a value ends: the number of its step, and elements from that one's start.
Place = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Course:
    """One walk: where its values end, and how far it has come."""

    places: Mapping[str, Place]
    reached: Place = (0, 0)
    has_begun: bool = False
    is_withdrawn: bool = False
    is_over: bool = False
    error: BaseException | None = None

    def has_passed(self, name: str) -> bool:
        place = self.places.get(name)
        return place is None or place <= self.reached


class Walk:
    """Steps behind the caller, one walk at a time. Any thread may ask and wait; one starts."""

    def __init__(self, use_device: Callable[[], object] = int) -> None:
        """Begin with nothing to wait for.

        Args:
            use_device: Makes the device current on the thread that the steps run on.
        """
        self._use_device = use_device
        self._waited_s = 0.0
        self._changed = threading.Condition()
        self._course: _Course | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def waited_s(self) -> float:
        """Seconds in which some thread waited for values or for a walk's end."""
        return self._waited_s

    @property
    def is_under_way(self) -> bool:
        """Whether `finish` has something to do."""
        return self._course is not None

    def start(
        self, steps: Sequence[Step], places: Mapping[str, Place], end: Callable[[], object]
    ) -> None:
        """Begin a walk; the one before has been finished.

        Args:
            steps: In order.
            places: Of each value that becomes new, by name.
            end: Called behind the last step, or the one that failed.

        Raises:
            RuntimeError: The system has no thread to give; nothing has begun.
        """
        if self._course is not None:
            raise AssertionError("the walk before was not finished")
        thread = self._get_thread()
        course = _Course(places)
        try:
            self._course = course
            thread.submit(self._run, course, steps, end)
        except BaseException:  # Ctrl-C too: nobody is to wait for what may never begin
            # No calls here, which Ctrl-C might come behind once more.
            course.is_withdrawn = True
            if not course.has_begun:
                self._course = None
            raise

    def run(self, function: Callable[[], None]) -> Future[None]:
        """Run a part of a step that is not a walk's yet, behind what runs already.

        Raises:
            RuntimeError: The system has no thread to give.
        """

        def run_on_device() -> None:
            self._use_device()
            function()

        return self._get_thread().submit(run_on_device)

    def has_passed(self, name: str) -> bool:
        """Return whether a value is new, or none of the walk's."""
        course = self._course
        return course is None or course.has_passed(name)

    def wait_for(self, names: Iterable[str]) -> None:
        """Return when all these values are new.

        Raises:
            StoreError: The walk ended before, or whatever else ended it.
        """
        course = self._course
        if course is None:
            return
        late = [name for name in names if not course.has_passed(name)]
        if not late:
            return
        self._wait_until(lambda: course.is_over or all(map(course.has_passed, late)))
        if course.error is not None and not all(map(course.has_passed, late)):
            raise course.error

    def finish(self) -> None:
        """Return when the walk is over; Ctrl-C ends the wait, not the walk.

        Raises:
            StoreError: It failed, or whatever else ended it; raised once.
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
        """Give the thread back, once nothing is under way."""
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
            # One for all walks: each thread has a stack and OpenMP's helpers.
            self._thread = ThreadPoolExecutor(1, "memascend-optimizer")
        return self._thread

    def _run(self, course: _Course, steps: Sequence[Step], end: Callable[[], object]) -> None:
        def reach(place: Place) -> None:
            with self._changed:
                course.reached = place
                self._changed.notify_all()

        # Before the question below: whoever withdraws it asks the other way round.
        course.has_begun = True
        try:
            if course.is_withdrawn:
                return
            self._use_device()
            for index, step in enumerate(steps):
                step(lambda numel, index=index: reach((index, numel)))  # type: ignore[misc]
                reach((index + 1, 0))
            end()
        except BaseException as error:  # whoever waits is to raise it
            course.error = error
            with suppress(Exception):  # the first error is the one to raise
                end()
        finally:
            with self._changed:
                course.is_over = True
                self._changed.notify_all()
