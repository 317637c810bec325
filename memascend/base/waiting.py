"""Waiting for several transfers: no memory is in flight behind an exception."""

from __future__ import annotations

from collections.abc import Callable, Iterable


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
