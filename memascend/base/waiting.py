"""Waiting: for several transfers, with no memory in flight behind an exception; for a device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from memascend.base.interfaces import Event

#: Events that are kept to be used again: about as many as slots, tiles and gathers need at once.
FREE_EVENTS_MAX = 512


class Ended:
    """The ticket of a transfer that was over before the call returned, or could not begin."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self) -> None:
        """Return at once; raise what kept it from beginning."""
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return true: nothing is in flight."""
        return True


class CopyTicket:
    """The ticket of a copy that a device makes: over once an event behind it has passed."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Return when the copy is over."""
        self._event.synchronize()

    def done(self) -> bool:
        """Return whether it is."""
        return self._event.query()


def wait_all(waits: Iterable[Callable[[], object]]) -> None:
    """Call all, each of which returns when something is over; then raise the first error."""
    first_error: Exception | None = None
    for wait in waits:
        try:
            wait()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def new_event(make: Callable[..., Event]) -> Event:
    """Return an event of a device, one whose `synchronize` lets the thread sleep where there is.

    CUDA's and some others spin by default: the wait for a copy then takes a core from the threads
    that feed the drive.

    Args:
        make: The accelerator's class of events.
    """
    try:
        return make(blocking=True)
    except TypeError:  # this accelerator's events know no such thing
        return make()


def event_here(make: Callable[[], Event] | None) -> Event | None:
    """Return an event behind what was issued on the current stream.

    Args:
        make: Makes an event of the device; None when it is the CPU, which needs none.
    """
    if make is None:
        return None
    event = make()
    event.record()
    return event


class EventPool:
    """Events of a device, used again; counts the time that threads wait for them.

    CUDA makes events under a lock of the driver, on which threads would meet in every step. An
    event comes back when the last reference to it is gone, and only if it was seen to have passed:
    so no host thread can ask an event that means something else by now, and no stream waits for it.
    Any thread may call.
    """

    def __init__(
        self, make: Callable[..., Event], *, free_count_max: int = FREE_EVENTS_MAX
    ) -> None:
        """Begin with none.

        Args:
            make: The accelerator's class of events.
            free_count_max: Most events that are kept to be used again.
        """
        self._make = make
        self._free: deque[Event] = deque(maxlen=free_count_max)
        self._lock = threading.Lock()
        self.waited_s = 0.0

    def __call__(self) -> Event:
        """Return an event that nobody else has."""
        try:
            return _PooledEvent(self._free.popleft(), self)
        except IndexError:
            return _PooledEvent(new_event(self._make), self)

    def take_back(self, event: Event) -> None:
        """Keep an event for the next call; without a lock, as the garbage collector may call."""
        self._free.append(event)

    def count_wait(self, seconds: float) -> None:
        """Count the time that a thread has waited."""
        with self._lock:
            self.waited_s += seconds


class _PooledEvent:
    """The one reference to an event of the device."""

    _has_passed = False  # of the class: Ctrl-C may come before there is an event

    def __init__(self, event: Event, pool: EventPool) -> None:
        self._pool, self._event = pool, event

    def __del__(self) -> None:
        if self._has_passed:
            self._pool.take_back(self._event)

    def record(self) -> None:
        self._has_passed = False
        self._event.record()

    def query(self) -> bool:
        self._has_passed = self._event.query()
        return self._has_passed

    def wait(self) -> None:
        self._event.wait()

    def synchronize(self) -> None:
        started_s = monotonic()
        try:
            self._event.synchronize()
        finally:
            self._pool.count_wait(monotonic() - started_s)
        self._has_passed = True
