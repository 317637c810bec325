"""Progress of long transfers: a bar on a terminal, and a log line at the end.

Only rank 0 shows a bar. Log records are printed above it meanwhile, also by handlers that hold the
terminal's streams, as DeepSpeed's does.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

log = logging.getLogger(__name__)

#: Minimum time between two updates of a bar.
UPDATE_INTERVAL_S = 0.1


#: Called with the number of bytes moved since the last call.
Advance = Callable[[int], None]


class Meter:
    """Counts bytes, and updates the display at intervals. Any thread may call it."""

    def __init__(self, show: Callable[..., object]) -> None:
        """Begin at zero; `show` gets `completed`, the bytes so far, or `description`, a text."""
        self.moved_bytes = 0
        self._show, self._shown_s = show, 0.0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """Add bytes that have been moved."""
        with self._lock:
            self.moved_bytes += nbytes
            now = time.monotonic()
            if now - self._shown_s < UPDATE_INTERVAL_S:
                return
            self._shown_s = now
        self.show()

    def describe(self, text: str) -> None:
        """Show the current action beside the bar."""
        self._show(description=text)

    def show(self) -> None:
        """Update the bar."""
        self._show(completed=self.moved_bytes)


@contextmanager
def byte_progress(title: str, nbytes: int | None, *, leads: bool) -> Iterator[Meter]:
    """Show the progress of the `with` block on the rank that leads, and log its speed at the end.

    The block moves about `nbytes`; None if unknown. It calls the meter with the bytes moved since
    the last call.
    """
    begin_s = time.monotonic()
    is_shown = leads and sys.stderr.isatty()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True, quiet=not is_shown),
        transient=True,
        disable=not is_shown,
    )
    task = bar.add_task(title, total=nbytes)
    meter = Meter(partial(bar.update, task))
    before = (sys.stdout, sys.stderr)
    with bar:
        # rich has replaced the streams; its own write above the bar.
        with _moved_logs(before, (sys.stdout, sys.stderr)):
            yield meter
        meter.show()
    if leads and meter.moved_bytes:
        elapsed_s = max(time.monotonic() - begin_s, 1e-9)
        log.info(
            "memascend: %s: %.2f GB in %.1f s (%.2f GB/s) on this rank",
            title,
            meter.moved_bytes / 1e9,
            elapsed_s,
            meter.moved_bytes / 1e9 / elapsed_s,
        )


@contextmanager
def _moved_logs(before: tuple[TextIO, ...], now: tuple[TextIO, ...]) -> Iterator[None]:
    """Redirect log handlers from the streams `before` to the streams `now` within the block."""
    moved = []
    others = list(logging.root.manager.loggerDict.values())
    for logger in (logging.root, *others):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            stream = getattr(handler, "stream", None)
            for old, new in zip(before, now, strict=True):
                if isinstance(handler, logging.StreamHandler) and stream is old is not new:
                    handler.setStream(new)
                    moved.append((handler, old))
    try:
        yield
    finally:
        for handler, old in moved:
            handler.setStream(old)
