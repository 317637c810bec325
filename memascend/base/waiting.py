"""Waits for several transfers, so that none is in flight behind an exception, and for a device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from memascend.base.interfaces import Event

#: Events kept for reuse: about as many as slots, tiles and gathers need at once.
FREE_EVENTS_MAX = 512


class Ended:
    """The ticket of a transfer that ended before the call returned, or could not begin."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self) -> None:
        """Return at once; raise the error that kept the transfer from beginning."""
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return True."""
        return True


class CopyTicket:
    """The ticket of a copy by a device: done once the event behind it has passed."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Wait until the copy has finished."""
        if not self._event.query():
            self._event.synchronize()

    def done(self) -> bool:
        """Return whether the copy has finished."""
        return self._event.query()


def wait_all(waits: Iterable[Callable[[], object]]) -> None:
    """Call all functions, each of which waits for a transfer; then raise the first error."""
    first_error: Exception | None = None
    for wait in waits:
        try:
            wait()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


def new_event(make: Callable[..., Event]) -> Event:
    """Return an event of a device, whose `synchronize` sleeps instead of spinning if it can.

    The events of CUDA and some other devices spin by default: waiting for a copy then takes a CPU
    core from the threads that serve the drive.
    """
    try:
        return make(blocking=True)
    except TypeError:  # this accelerator's events have no such argument
        return make()


def event_here(make: Callable[[], Event] | None) -> Event | None:
    """Return an event, recorded on the current stream; None for the CPU, which needs none."""
    if make is None:
        return None
    event = make()
    event.record()
    return event


class EventPool:
    """A pool of device events, which also counts the time that threads wait for them.

    CUDA creates events under a lock of the driver, on which threads would contend in every step. An
    event returns to the pool with its last reference, and only if it was seen to have passed: so no
    host thread still queries it under its old meaning, and no stream waits for it. Any thread may
    call.
    """

    def __init__(
        self, make: Callable[..., Event], *, free_count_max: int = FREE_EVENTS_MAX
    ) -> None:
        self._make = make
        self._free: deque[Event] = deque(maxlen=free_count_max)
        self._lock = threading.Lock()
        self.waited_s = 0.0

    def __call__(self) -> Event:
        """Return an event that no other caller uses."""
        try:
            return _PooledEvent(self._free.popleft(), self)
        except IndexError:
            return _PooledEvent(new_event(self._make), self)

    def take_back(self, event: Event) -> None:
        """Keep an event for reuse; takes no lock, since the garbage collector may call this."""
        self._free.append(event)

    def count_wait(self, seconds: float) -> None:
        """Add the time that a thread has waited."""
        with self._lock:
            self.waited_s += seconds


class _PooledEvent:
    """The only reference to an event of the device."""

    _has_passed = False  # on the class: Ctrl-C may interrupt __init__ before there is an event

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
