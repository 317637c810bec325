"""A yardstick for `memascend volume bench`: fio with the same request size and depth.

It gets a file of its own beside ours, which is removed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from typing import Any

from memascend import _core
from memascend.errors import StoreError
from memascend.volumes.speed import Load, Mode

_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}


def find() -> str | None:
    """Return where fio is, None when it is not installed."""
    return shutil.which("fio")


def run(
    program: str,
    volume: _core.VolumeOptions,
    *,
    mode: Mode,
    load: Load,
    engine: str,
    seconds: float,
) -> float:
    """Return the bytes per second, reads and writes together.

    On a device only our own range is used. fio counts whole seconds.

    Raises:
        StoreError: fio failed; with its message.
    """
    path = volume.path
    with contextlib.ExitStack() as stack:
        file = path
        if volume.descriptor < 0:
            file = stack.enter_context(
                tempfile.NamedTemporaryFile(dir=path, prefix=".memascend-fio-")
            ).name
        line = [
            program,
            "--name=memascend",
            f"--filename={_escaped(file)}",
            f"--offset={volume.start_bytes}",
            f"--size={min(load.span_bytes, volume.capacity_bytes)}",
            f"--rw={_PATTERNS[mode]}",
            f"--bs={load.chunk_bytes}",
            f"--iodepth={load.queue_depth}",
            # Without io_uring fio needs libaio for a depth: its synchronous engines have none.
            f"--ioengine={'io_uring' if engine == 'uring' else 'libaio'}",
            "--direct=1",
            "--time_based",
            f"--runtime={max(1, round(seconds))}",
            "--output-format=json",
        ]
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, timeout=seconds + 300, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise StoreError(0, f"fio failed in {path}: {error}") from error
    if done.returncode != 0:
        raise StoreError(0, f"fio failed in {path}: {(done.stderr or done.stdout).strip()[:500]}")
    try:
        # Warnings may stand before the object.
        report: Any = json.loads(done.stdout[done.stdout.index("{") :])
        job = report["jobs"][0]
        return float(job["read"]["bw_bytes"]) + float(job["write"]["bw_bytes"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise StoreError(0, f"fio printed what memascend cannot read: {error!r}") from error


def _escaped(path: str) -> str:
    """Escape a path for fio, which splits names at colons."""
    return path.replace("\\", "\\\\").replace(":", "\\:")
