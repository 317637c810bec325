"""Where the host waits: for the device as that tells, for the drive by memascend's tickets."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

#: Why, where, how often, and how long in milliseconds.
Wait = tuple[str, str, int, float]
FRAMES_SHOWN = 3


def watch_drive(patch: pytest.MonkeyPatch) -> Callable[[], list[Wait]]:
    """Time what waits for a ticket; return what tells it."""
    from memascend import _core

    found: dict[str, tuple[int, float]] = {}
    original = _core.Ticket.wait

    def wait(self: _core.Ticket) -> None:
        start = time.monotonic()
        try:
            original(self)
        finally:
            place = _place()
            count, milliseconds = found.get(place, (0, 0.0))
            found[place] = count + 1, milliseconds + (time.monotonic() - start) * 1e3

    patch.setattr(_core.Ticket, "wait", wait)
    return lambda: [("drive", place, *counted) for place, counted in found.items()]


def _place() -> str:
    places = []
    frame = sys._getframe(2)
    while frame is not None and len(places) < FRAMES_SHOWN:
        file = frame.f_code.co_filename
        for root in ("/site-packages/", "/memascend/", "/tests/"):
            at = file.rfind(root)
            if at >= 0:
                file = file[at + 1 :]
                break
        places.append(f"{file.removeprefix('site-packages/')}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)
