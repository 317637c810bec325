"""A yardstick for `memascend volume bench`: fio with the same request size and depth.

It gets a file of its own beside ours, which is removed afterwards.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from typing import Any

from memascend.errors import StoreError
from memascend.volume_speed import Load, Mode

_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}


def find() -> str | None:
    """Where fio is, None when it is not installed."""
    return shutil.which("fio")


def command(
    program: str, file: str, *, mode: Mode, load: Load, engine: str, seconds: float
) -> list[str]:
    """What is run, for the report and for whoever wants to repeat it."""
    return [
        program,
        "--name=memascend",
        f"--filename={_escaped(file)}",
        f"--size={load.span_bytes}",
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


def run(program: str, path: str, *, mode: Mode, load: Load, engine: str, seconds: float) -> float:
    """Bytes per second, reads and writes together.

    Args:
        program: fio.
        path: Folder on the drive.
        mode: What to do.
        load: Size and depth of requests, and how much of the drive.
        engine: Name of the engine it is compared with.
        seconds: How long; fio counts whole ones.

    Raises:
        StoreError: fio failed; says what it said.
    """
    with tempfile.NamedTemporaryFile(dir=path, prefix=".memascend-fio-") as file:
        line = command(program, file.name, mode=mode, load=load, engine=engine, seconds=seconds)
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
        raise StoreError(0, f"fio said what memascend cannot read: {error!r}") from error


def _escaped(path: str) -> str:
    """What fio takes as one name: a colon would end it."""
    return path.replace("\\", "\\\\").replace(":", "\\:")
