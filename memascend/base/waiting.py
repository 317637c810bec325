"""Waiting for several transfers: no memory is in flight behind an exception."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Waitable(Protocol):
    """Something in flight."""

    def wait(self) -> None:
        """Return when it is over; raise when it failed."""


def wait_all(waitables: Iterable[Waitable]) -> None:
    """Wait for all, then raise the first error."""
    first_error: Exception | None = None
    for waitable in waitables:
        try:
            waitable.wait()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
