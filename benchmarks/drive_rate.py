"""A drive of a stated rate: so much may this program and its children read and write in a second.

A control group of the kernel holds the rate, for whoever transfers in whatever way: DeepSpeed's
operators, memascend's engines, the timing of the drive alone. So a machine with few cores can show
what one with more of them does with a faster drive. Reads and writes have a rate each. Needs root,
and control groups with `blkio` (version 1) or `io` (version 2).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from memascend.system.mounts import drives_below

GROUPS = Path("/sys/fs/cgroup")
MEMBERS = "cgroup.procs"
GIGA = 1e9


@contextmanager
def drive_rate(directory: Path, rates: Sequence[float] | None) -> Iterator[None]:
    """Holds the drives below a directory to a rate, each of them.

    Args:
        directory: On the drives.
        rates: GB/s of reads, and of writes; None: as fast as they are.

    Raises:
        ValueError: A rate is not above 0.
        RuntimeError: This machine cannot: it says why.
    """
    if rates is None:
        yield
        return
    if not all(rate > 0 for rate in rates):
        # The kernel would take 0 as no limit at all.
        raise ValueError(f"a drive's rates are GB/s of reads and of writes above 0, not {rates}")
    group = _new_group()
    former = _own_group(group.parent)
    try:
        try:
            for number in _numbers(directory):
                for name, line in _limits(group, number, *(round(rate * GIGA) for rate in rates)):
                    (group / name).write_text(line)
            _join(group)
        except OSError as error:
            raise RuntimeError(f"{group} takes no rate for {directory}: {error}") from error
        yield
    finally:
        _join(former)
        group.rmdir()


def _new_group() -> Path:
    try:
        if (GROUPS / "blkio" / "blkio.throttle.read_bps_device").exists():
            root = GROUPS / "blkio"
        elif "io" in (GROUPS / "cgroup.controllers").read_text().split():
            root = GROUPS
            (root / "cgroup.subtree_control").write_text("+io")
        else:
            raise OSError("the controller `io` is not there")
        group = root / f"memascend-bench-{os.getpid()}"
        group.mkdir()
        return group
    except OSError as error:
        raise RuntimeError(
            f"no control group to hold a drive's rate with: {error}; it takes root, and {GROUPS} "
            "with blkio (version 1) or io (version 2)"
        ) from error


def _own_group(root: Path) -> Path:
    """The group of the same hierarchy that this program is in; the root where that is hidden."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("blkio" in controllers.split(",")) if root.name == "blkio" else not controllers:
            group = root / path.removeprefix("/")
            return group if group.exists() else root  # a container may see only a part
    return root


def _join(group: Path) -> None:
    (group / MEMBERS).write_text(str(os.getpid()))


def _numbers(directory: Path) -> list[str]:
    """Device numbers of the drives below a directory."""
    drives = drives_below(directory)
    if not drives:
        raise RuntimeError(f"{directory} is on no drive of this machine, whose rate could be held")
    return [Path("/sys/block", drive, "dev").read_text().strip() for drive in drives]


def _limits(group: Path, number: str, read: int, written: int) -> list[tuple[str, str]]:
    """Names of files, and what goes into each: bytes per second of a drive."""
    if group.parent.name == "blkio":
        return [
            ("blkio.throttle.read_bps_device", f"{number} {read}"),
            ("blkio.throttle.write_bps_device", f"{number} {written}"),
        ]
    return [("io.max", f"{number} rbps={read} wbps={written}")]
