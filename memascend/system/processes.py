"""Measures the memory, disk and I/O of a process and all its descendants from outside.

Reads procfs and sysfs only, so the processes need not cooperate. One sampler watches one tree from
one thread of its own; read `samples` after `stop()`.

Two facts of Linux determine how things are counted here:
- Explicit huge pages are not in the RSS or PSS of a process. They are added, so that the total does
  not depend on the kind of pages.
- When a parent waits for a child, the kernel adds the child's I/O counters to the parent's. So the
  traffic of a finished tree is the growth of *our* counters (`IoCounter`): exact, complete to the
  last byte, and counted once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from memascend.base.units import KIB
from memascend.system.memory import process_status
from memascend.system.mounts import PROC, drives_below, read_lines

# Process discovery walks all of /proc, PSS page tables, disk use folders: sampled less often.
TREE_INTERVAL_S = 0.25
DRIVE_INTERVAL_S = 0.25
PSS_INTERVAL_S = 0.5
DISK_INTERVAL_S = 1.0

_SECTOR_BYTES = 512  # unit of st_blocks, independent of the device's sectors


@dataclass(frozen=True, slots=True)
class Sample:
    """The tree at one moment."""

    time_s: float  # seconds since the sampler started
    rss_bytes: dict[int, int]  # resident bytes by process id, explicit huge pages included
    locked_bytes: int  # bytes locked by mlock (VmLck), over all processes
    registered_bytes: int  # bytes pinned for devices and rings (VmPin), over all processes

    @property
    def total_rss_bytes(self) -> int:
        """Sum over the processes; a shared page counts once per process."""
        return sum(self.rss_bytes.values())

    def above(self, baseline_bytes: int) -> int:
        """Return the sum over the processes of the bytes that each holds beyond `baseline_bytes`.

        With the size of `import torch` as the baseline a launcher counts as zero, and a training
        process only counts its own allocations.
        """
        return sum(max(0, rss - baseline_bytes) for rss in self.rss_bytes.values())


@dataclass(frozen=True, slots=True)
class DriveSample:
    """The counters of the drives at one moment, by drive name; sums over all programs."""

    time_s: float  # seconds since the sampler started
    counters: dict[str, Any]  # with `read_bytes`, `write_bytes` and more, as psutil has them


@dataclass(slots=True)
class Peaks:
    """Largest values of the quantities that are not kept in samples."""

    pss_bytes: int = 0
    disk_bytes: int = 0
    process_rss_bytes: dict[int, int] = field(default_factory=dict)


def drive_counters(names: Iterable[str]) -> dict[str, Any]:
    """Return psutil's counters of each drive that the kernel counts, named as in sysfs.

    A container may hide them, and the kernel may count a device in a form that psutil does not
    know: none are returned then.
    """
    counted: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, NotImplementedError):
        counted = psutil.disk_io_counters(perdisk=True, nowrap=False)
    # The kernel writes "!" for the "/" of a device's name in sysfs alone.
    found = {name: counted.get(name.replace("!", "/")) for name in names}
    return {name: counters for name, counters in found.items() if counters is not None}


class TreeSampler:
    """Samples a process tree from a thread of its own until stopped.

    Files below `folders` that changed at the Unix time `since` or later count as disk use, and the
    drives of the folders are sampled.
    """

    def __init__(
        self,
        pid: int,
        *,
        interval_s: float = 0.05,
        folders: Sequence[Path] = (),
        since: float | None = None,
    ) -> None:
        self.samples: list[Sample] = []
        self.drive_samples: list[DriveSample] = []
        self.peaks = Peaks()
        self._root = pid
        self._interval_s = interval_s
        self._folders = tuple(folders)
        self._drives = drives_of(folders)
        self._since = time.time() if since is None else since
        self._started_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memascend-sampler", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """End sampling; the samples stay."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        pids: list[int] = []
        tree_due = drive_due = pss_due = disk_due = 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= tree_due:
                pids = process_tree(self._root)
                tree_due = now + TREE_INTERVAL_S
            sample = self._sample(pids, now - self._started_s)
            if sample.rss_bytes:
                self.samples.append(sample)
            if now >= drive_due and self._drives:
                counters = drive_counters(self._drives)
                self.drive_samples.append(DriveSample(now - self._started_s, counters))
                drive_due = now + DRIVE_INTERVAL_S
            if now >= pss_due:
                pss = sum(pss_bytes(pid) for pid in pids)
                self.peaks.pss_bytes = max(self.peaks.pss_bytes, pss)
                pss_due = time.monotonic() + PSS_INTERVAL_S
            if now >= disk_due and self._folders:
                used = sum(disk_bytes(folder, since=self._since) for folder in self._folders)
                used += nameless_disk_bytes(pids, self._folders)
                self.peaks.disk_bytes = max(self.peaks.disk_bytes, used)
                disk_due = time.monotonic() + DISK_INTERVAL_S
            self._stopping.wait(self._interval_s)

    def _sample(self, pids: list[int], time_s: float) -> Sample:
        rss: dict[int, int] = {}
        locked = registered = 0
        for pid in pids:
            status = process_status(pid)
            if "VmRSS" not in status:
                continue
            huge = status.get("HugetlbPages", 0)
            rss[pid] = status["VmRSS"] + huge
            locked += status.get("VmLck", 0)
            registered += status.get("VmPin", 0)
            peak = status.get("VmHWM", 0) + huge
            self.peaks.process_rss_bytes[pid] = max(
                self.peaks.process_rss_bytes.get(pid, 0), peak, rss[pid]
            )
        return Sample(time_s, rss, locked, registered)


class IoCounter:
    """Storage traffic of this process, and of children it has waited for, since it was made."""

    def __init__(self) -> None:
        self._start = _own_io()

    def read_and_written_bytes(self) -> tuple[int, int] | None:
        """Return (read, written) in bytes, or None if the kernel keeps no such counters."""
        now = _own_io()
        if self._start is None or now is None:
            return None
        return now[0] - self._start[0], now[1] - self._start[1]


def drives_of(paths: Iterable[Path]) -> list[str]:
    """Return the drives below some paths, which need not exist yet."""
    found = set()
    for path in paths:
        real = Path(os.path.abspath(path))
        there = next((folder for folder in (real, *real.parents) if folder.exists()), real)
        found.update(drives_below(there))
    return sorted(found)


def process_tree(pid: int) -> list[int]:
    """Return the process and all its living descendants; empty when it is gone."""
    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.Error:
        return []


def pss_bytes(pid: int) -> int:
    """Return a process's proportional share of resident memory, 0 when it cannot be read."""
    counted = ("Pss:", "Private_Hugetlb:", "Shared_Hugetlb:")
    lines = read_lines(PROC / f"{pid}/smaps_rollup")
    return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(counted))


def disk_bytes(folder: Path, *, since: float) -> int:
    """Return the bytes allocated to the files below `folder` changed at `since` or later."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                entry = os.stat(os.path.join(parent, name), follow_symlinks=False)
                if entry.st_ctime >= since:
                    total += entry.st_blocks * _SECTOR_BYTES
    return total


def nameless_disk_bytes(pids: Sequence[int], folders: Sequence[Path]) -> int:
    """Return the bytes of unlinked files that the processes keep open in `folders`."""
    below = tuple(f"{folder.resolve()}/" for folder in folders)
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if not os.readlink(descriptor).startswith(below):
                        continue
                    entry = descriptor.stat()
                    if entry.st_nlink == 0:
                        found[entry.st_dev, entry.st_ino] = entry.st_blocks * _SECTOR_BYTES
    return sum(found.values())


def _own_io() -> tuple[int, int] | None:
    counts = dict(line.split(": ") for line in read_lines(PROC / "self/io"))
    return (int(counts["read_bytes"]), int(counts["write_bytes"])) if counts else None
