"""The optimizer's walk while it goes on behind the caller: how far it is, and who waits for it.

Knows names of values and the order in which they become new; neither tensors nor the drive. The
steps run on a thread of their own, one after the other. Whoever wants a value waits until it is
new, and no longer; whoever changes what the walk works with waits for its end.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

#: One sub-group's part; calls back with the elements that are new so far, counted from its start.
Step = Callable[[Callable[[int], None]], None]
#: Where a value ends: the number of its step, and elements from that one's start.
Place = tuple[int, int]


class Walk:
    """Steps behind the caller, one walk at a time. Any thread may ask; one starts and finishes."""

    def __init__(self) -> None:
        """Begin with nothing to wait for."""
        self._changed = threading.Condition()
        self._places: Mapping[str, Place] = {}  # of values that are not new before the walk's end
        self._reached: Place = (0, 0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether `finish` has something to do."""
        return self._thread is not None

    def start(self, steps: Sequence[Step], places: Mapping[str, Place]) -> None:
        """Begin a walk; the one before has been finished.

        Args:
            steps: In order.
            places: Of each value that becomes new, by name.
        """
        if self._thread is not None:
            raise AssertionError("the walk before was not finished")
        self._places, self._reached = places, (0, 0)
        self._thread = threading.Thread(target=self._run, args=(steps,), name="memascend-optimizer")
        self._thread.start()

    def has_passed(self, name: str) -> bool:
        """Return whether a value is new, or none of the walk's."""
        place = self._places.get(name)
        return place is None or place <= self._reached

    def wait_for(self, names: Iterable[str]) -> None:
        """Return when all these values are new.

        Raises:
            StoreError: The walk ended before, or whatever else ended it.
        """
        late = [name for name in names if not self.has_passed(name)]
        if not late:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._error or all(map(self.has_passed, late)))
        if self._error is not None and not all(map(self.has_passed, late)):
            raise self._error

    def finish(self) -> None:
        """Return when the walk is over.

        Raises:
            StoreError: It failed, or whatever else ended it; raised once.
        """
        thread = self._thread
        if thread is None:
            return
        thread.join()
        self._thread = None
        self._places = {}
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, steps: Sequence[Step]) -> None:
        try:
            for index, step in enumerate(steps):
                step(functools.partial(self._reach, index))
                self._reach(index + 1, 0)
        except BaseException as error:  # whoever waits is to raise it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _reach(self, index: int, end: int) -> None:
        with self._changed:
            self._reached = (index, end)
            self._changed.notify_all()
