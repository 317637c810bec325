"""Waiting: for several transfers, with no memory in flight behind an exception; for a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from memascend.base.interfaces import Event


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


class CountedEvents:
    """Makes events of a device, and counts the time that threads wait for them.

    Stands where the accelerator's class of events does.
    """

    def __init__(self, make: Callable[..., Event]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self.waited_s = 0.0

    def __call__(self, **settings: Any) -> Event:
        """Return an event like the accelerator's."""
        return _CountedEvent(self._make(**settings), self)

    def add(self, seconds: float) -> None:
        """Count what a thread has waited."""
        with self._lock:
            self.waited_s += seconds


class _CountedEvent:
    def __init__(self, event: Event, counter: CountedEvents) -> None:
        self._event, self._counter = event, counter

    def record(self) -> None:
        self._event.record()

    def query(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.wait()

    def synchronize(self) -> None:
        started_s = monotonic()
        try:
            self._event.synchronize()
        finally:
            self._counter.add(monotonic() - started_s)
