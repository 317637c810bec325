"""From a path to its mount, its block device and its drives.

Reads procfs and sysfs, below folders that tests replace. Nothing here opens a device.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
PROC = Path("/proc")
#: Advice for a file system that copies data on overwrite.
COPY_ON_WRITE_FIX = (
    "ext4 or XFS, a raw device, or on btrfs a directory without snapshots and compression "
    "(chattr -R +C, btrfs property set <directory> compression none)"
)
#: Kinds of file systems whose files are host memory.
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_STACK_DEPTH_MAX = 8  # of device-mapper and md volumes over each other


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    number: str  # number of the file system's device, such as "259:1"
    point: str  # folder of the mount point
    kind: str  # type of the file system, such as "ext4"
    source: str  # the mounted device or share, such as "/dev/nvme0n1p1"


def read_mounts(proc: Path = PROC) -> list[Mount]:
    """Return the mounts, in the order of mounting; empty if they cannot be read."""
    found = []
    for line in read_lines(proc / "self/mountinfo"):
        mount, _, origin = line.partition(" - ")
        words, kind_and_source = mount.split(), origin.split()
        if len(words) >= 5 and len(kind_and_source) >= 2:
            kind, source = map(unescaped, kind_and_source[:2])
            found.append(Mount(words[2], unescaped(words[4]), kind, source))
    return found


def mount_of(path: str | os.PathLike[str], proc: Path = PROC) -> Mount | None:
    """Return the mount that holds an existing path, None if it cannot be found."""
    mounts, number = read_mounts(proc), device_number(path)
    for mount in mounts:
        if mount.number == number:
            return mount
    # Some file systems (btrfs) give their files a device number of their own.
    real = Path(path).resolve()
    above = [mount for mount in mounts if real.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(mount.point), default=None)


def filesystem_of(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that holds an existing path, such as "ext4"."""
    mount = mount_of(path)
    return "unknown file system" if mount is None else mount.kind


def device_number(path: str | os.PathLike[str]) -> str:
    """Return the number, such as "259:1", of a block device, or of the device of a directory."""
    state = os.stat(path)
    device = state.st_rdev if stat.S_ISBLK(state.st_mode) else state.st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def block_folder(
    path: str | os.PathLike[str], sysfs: Path = SYSFS, proc: Path = PROC
) -> Path | None:
    """Return the sysfs folder of a block device, or of the device below an existing directory.

    None for a path on no block device of this machine: tmpfs, a network share. For a btrfs over
    several devices it is the device that was mounted.
    """
    link = sysfs / "dev/block" / device_number(path)
    if not link.exists():
        mount = mount_of(path, proc)
        name = device_name(mount.source) if mount is not None else ""
        link = sysfs / "class/block" / (name or "none")
    return link.resolve() if link.exists() else None


def drives_below(path: str | os.PathLike[str], sysfs: Path = SYSFS, proc: Path = PROC) -> list[str]:
    """Return the kernel's names of the drives below a block device or a directory.

    Partitions lead to their disk; device-mapper and md volumes to all of their parts. Empty for a
    path on no drive of this machine, or one that does not exist.
    """
    try:
        folder = block_folder(path, sysfs, proc)
        return [] if folder is None else sorted(_drives_of(folder))
    except OSError:
        return []


def device_name(source: str) -> str:
    """Return the kernel's name of a device from its path, symbolic links resolved; else ""."""
    return os.path.basename(os.path.realpath(source)) if source.startswith("/dev/") else ""


def unescaped(text: str) -> str:
    """Replace the octal escapes that the kernel writes for blanks, line ends and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a procfs or sysfs file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def read_line(path: Path) -> str:
    """Return the first line of a procfs or sysfs file, stripped; "" if there is none."""
    return "".join(read_lines(path)[:1]).strip()


def _drives_of(folder: Path, depth: int = _STACK_DEPTH_MAX) -> set[str]:
    if (folder / "partition").exists():
        folder = folder.parent
    slaves = [slave.resolve() for slave in (folder / "slaves").glob("*")]
    if not slaves or depth == 0:
        return {folder.name}
    return set().union(*(_drives_of(slave, depth - 1) for slave in slaves))
