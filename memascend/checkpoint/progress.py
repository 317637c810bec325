"""How far long work with many bytes is: a bar where somebody looks at it, else a log line after it.

On a terminal rank 0 alone shows a bar. What is logged meanwhile goes above it, also by handlers
that hold the terminal's streams, as DeepSpeed's does.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from memascend.checkpoint.files import Advance, Reader
from memascend.checkpoint.source import LoadedTensor

log = logging.getLogger(__name__)

#: Least time between two updates of a bar, however small the tensors are.
UPDATE_INTERVAL_S = 0.1


class _Meter:
    """Counts bytes, and shows them now and then."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self.moved_bytes = 0
        self._show, self._shown_s = show, 0.0

    def __call__(self, nbytes: int) -> None:
        self.moved_bytes += nbytes
        now = time.monotonic()
        if now - self._shown_s >= UPDATE_INTERVAL_S:
            self._shown_s = now
            self.show()

    def show(self) -> None:
        self._show(self.moved_bytes)


class _CountedReader:
    """A tensor whose bytes are counted while they are read."""

    def __init__(self, reader: Reader, advance: Advance) -> None:
        self._reader, self._advance = reader, advance

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        self._reader.fill(begin_bytes, target)
        self._advance(target.numel())

    def close(self) -> None:
        self._reader.close()


def counted(tensor: LoadedTensor, advance: Advance) -> LoadedTensor:
    """Return a tensor of a checkpoint that calls back with the bytes that are read of it."""
    return replace(tensor, reader=_CountedReader(tensor.reader, advance))


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
    meter = _Meter(lambda moved_bytes: bar.update(task, completed=moved_bytes))
    before = (sys.stdout, sys.stderr)
    with bar:
        # What rich has put there writes above the bar.
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
    """Have handlers of logs that write to one of some streams write to another meanwhile."""
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
