"""How far a save or a load is: a bar where somebody looks at it, a log line where nobody does."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

log = logging.getLogger(__name__)


class ByteProgress:
    """Counts bytes towards a total. Only a rank that `leads` shows anything."""

    def __init__(self, title: str, nbytes: int, *, leads: bool) -> None:
        """Shows nothing before it is entered."""
        self._title, self._leads = title, leads
        self._moved_bytes, self._begin_s = 0, 0.0
        self._bar: Progress | None = None
        if leads and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.add_task(title, total=nbytes)

    def advance(self, nbytes: int) -> None:
        """Adds bytes that have been moved."""
        self._moved_bytes += nbytes
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], nbytes)

    def __enter__(self) -> ByteProgress:
        self._begin_s = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._leads and error is None and self._moved_bytes:
            elapsed_s = max(time.monotonic() - self._begin_s, 1e-9)
            log.info(
                "memascend: %s: %.2f GB in %.1f s (%.2f GB/s) on this rank",
                self._title,
                self._moved_bytes / 1e9,
                elapsed_s,
                self._moved_bytes / 1e9 / elapsed_s,
            )
