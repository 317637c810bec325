"""GPUs of this machine, as NVIDIA's driver tells them. Imports no torch and starts no context."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from memascend.base.units import MIB

PROGRAM = "nvidia-smi"
TIMEOUT_S = 20.0
_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    name: str
    memory_bytes: int
    driver: str  # version of the driver


def list_gpus() -> list[Gpu]:
    """Return the GPUs in the driver's order; empty without a driver, or if it does not answer."""
    program = shutil.which(PROGRAM)
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        Gpu(name, int(mebibytes) * MIB, driver)
        for name, mebibytes, driver in (row for row in rows if len(row) == 3)
        if mebibytes.isdecimal()
    ]
