"""How far a save or a load is: a bar where somebody looks at it, a log line where nobody does."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from memascend.checkpoint.files import Advance

log = logging.getLogger(__name__)


@contextmanager
def byte_progress(title: str, nbytes: int, *, leads: bool) -> Iterator[Advance]:
    """Show how far the block is, and log its speed after it.

    Args:
        title: Of the bar and of the log line.
        nbytes: How many bytes the block is going to move, about.
        leads: Whether this rank shows anything; the others only count.

    Yields:
        To be called with the bytes that have been moved since the last call.
    """
    begin_s = time.monotonic()
    is_shown = leads and sys.stderr.isatty()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True, quiet=not is_shown),
        transient=True,
        disable=not is_shown,
    ) as bar:
        task = bar.add_task(title, total=nbytes)
        yield functools.partial(bar.advance, task)
    moved_bytes = bar.tasks[0].completed
    if leads and moved_bytes:
        elapsed_s = max(time.monotonic() - begin_s, 1e-9)
        log.info(
            "memascend: %s: %.2f GB in %.1f s (%.2f GB/s) on this rank",
            title,
            moved_bytes / 1e9,
            elapsed_s,
            moved_bytes / 1e9 / elapsed_s,
        )
