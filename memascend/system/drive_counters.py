"""The traffic of drives since the machine started, from the kernel's own counters.

Reads sysfs, below a folder that tests replace. The counters are sums over all programs, and count
only traffic that reached the drive: not reads that the page cache served.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memascend.system.mounts import SYSFS, drives_below, read_line

#: Unit of the counters, independent of the drive's sectors (Documentation/block/stat.rst).
_SECTOR_BYTES = 512
_FIELD_COUNT_MIN = 10


@dataclass(frozen=True, slots=True)
class DriveCounters:
    """The counters of one drive since the machine started."""

    read_bytes: int
    written_bytes: int
    busy_s: float  # seconds with requests in flight


def read_counters(name: str, sysfs: Path = SYSFS) -> DriveCounters | None:
    """Return the counters of a drive, given its kernel name; None if it has none."""
    fields = read_line(sysfs / "class/block" / name / "stat").split()
    if len(fields) < _FIELD_COUNT_MIN or not all(field.isdigit() for field in fields):
        return None
    return DriveCounters(
        read_bytes=int(fields[2]) * _SECTOR_BYTES,
        written_bytes=int(fields[6]) * _SECTOR_BYTES,
        busy_s=int(fields[9]) / 1000,
    )


def drives_of(paths: Iterable[Path]) -> list[str]:
    """Return the drives below some paths, which need not exist yet."""
    found = set()
    for path in paths:
        real = Path(os.path.abspath(path))
        there = next((folder for folder in (real, *real.parents) if folder.exists()), real)
        found.update(drives_below(there))
    return sorted(found)
