"""Memory of this machine and of its processes, as the kernel counts it.

Reads procfs and the files of control groups below a folder that tests replace. Ranks read at
different moments, so a caller that needs the same size on every rank takes the smallest value of
all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from memascend.base.units import KIB
from memascend.errors import ConfigError
from memascend.system.mounts import read_line, read_lines

ROOT, PROC = Path("/"), Path("/proc")


def memory_available(root: Path = ROOT) -> int:
    """Return the bytes this process can use: the minimum of available memory and limits.

    Counts the machine's MemTotal and MemAvailable, and the memory limit of this process's control
    group and of every group above it (cgroup v2 and v1). The usage of other processes in the same
    group is not subtracted.

    Raises:
        ConfigError: The kernel's files are missing; set the limit in bytes instead.
    """
    return _least([*_machine(root, "MemTotal", "MemAvailable"), *_groups(root)], root)


def memory_total(root: Path = ROOT) -> int:
    """Return the bytes in total, used or not: the minimum of the machine's memory and its limits.

    A limit given as a fraction is a fraction of this, so that the same configuration gives the same
    limit on every run. Errors are those of `memory_available`.
    """
    return _least([*_machine(root, "MemTotal"), *_groups(root)], root)


def group_limit(root: Path = ROOT) -> int | None:
    """Return the tightest memory limit of our control group and its parents, None without one."""
    return min(_groups(root), default=None)


def resident_memory(proc: Path = PROC) -> tuple[int, int]:
    """Return the resident bytes of this process (now, peak); zeros if they are unknown."""
    found = process_status("self", proc)
    now = found.get("VmRSS", 0)
    return now, max(now, found.get("VmHWM", 0))


def process_status(pid: int | str, proc: Path = PROC) -> dict[str, int]:
    """Return the byte counts of a process's `status` in procfs; empty when the process is gone."""
    sizes: dict[str, int] = {}
    for line in read_lines(proc / str(pid) / "status"):
        if line.endswith(" kB"):
            key, _, value = line.partition(":")
            sizes[key] = int(value.split()[0]) * KIB
    return sizes


def _least(found: list[int], root: Path) -> int:
    if not found:
        raise ConfigError(
            f"cannot find out how much memory there is: neither {root / 'proc/meminfo'} nor a "
            "control group has a number. Set memascend.host_memory_limit to a number of bytes, "
            'such as "6GiB"'
        )
    return min(found)


def _machine(root: Path, *names: str) -> Iterator[int]:
    for line in read_lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name in names:
            with contextlib.suppress(ValueError, IndexError):
                yield int(value.split()[0]) * KIB


def _groups(root: Path) -> Iterator[int]:
    """Yield every limit from our group upwards; "max" and a missing file are no limit."""
    for mount, group, file in _memberships(root):
        folder = mount / group
        # Seen from within a container the group's own path may not exist below the mount; the
        # folders above it, down to the mount itself, still have the limits that bind us.
        while True:
            with contextlib.suppress(ValueError):
                yield int(read_line(folder / file))
            if folder == mount:
                break
            folder = folder.parent


def _memberships(root: Path) -> Iterator[tuple[Path, PurePosixPath, str]]:
    """Yield (mount point, our group below it, name of the limit's file)."""
    mounts = root / "sys/fs/cgroup"
    for line in read_lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        # A process outside its cgroup namespace sees "/../..": nothing above the mount is visible.
        group = PurePosixPath(*(part for part in name.split("/") if part not in ("", "..")))
        if controllers == "":
            yield mounts, group, "memory.max"
            yield mounts / "unified", group, "memory.max"
        elif "memory" in controllers.split(","):
            yield mounts / "memory", group, "memory.limit_in_bytes"
