"""The limit of host memory: what the user wrote, and what this process can have.

Pure but for reading the kernel's files below a folder that tests replace. Knows no plan: it is
given numbers and gives numbers. Ranks ask at different moments, so whoever builds something that
must be the same on every rank agrees on the smallest answer first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from memascend.base.units import KIB, NBYTES_MAX, parse_nbytes
from memascend.errors import ConfigError

KEY = "memascend.host_memory_limit"
#: Without a stated limit, take at most this share of what is free.
DEFAULT_SHARE = 0.5


def parse_limit(value: object, *, available: int) -> int | None:
    """Return the configured limit in bytes.

    Args:
        value: None for no stated limit; a number of bytes; text such as "6GiB"; or a fraction of
            `available`, above 0 and up to 1. A bare 1 is the fraction: nobody means one byte.
        available: Bytes there are, from `memory_total`.

    Raises:
        ConfigError: Anything else; names the key, the value and what is allowed.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            nbytes = parse_nbytes(value)
        except ConfigError as error:
            raise _refused(value, "it is not a number with a known unit") from error
        if nbytes == 0:
            raise _refused(value, "it comes to 0 bytes; a fraction is a number, not text")
        return nbytes
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(value, f"it is a {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _refused(value, "it is not a finite number")
    if value <= 0:
        raise _refused(value, "it must be above 0")
    if value <= 1:
        return max(1, int(value * available))
    if value != int(value):
        raise _refused(value, "a fraction is at most 1, and bytes are a whole number")
    if value >= NBYTES_MAX:
        raise _refused(value, "it is more than there can be")
    return int(value)


def default_limit(plan_default_bytes: int, *, available: int) -> int:
    """The limit when the key is left out.

    It is what the plan takes by default (no resident cache), but no more than half of what is
    free: the other half is for the model's own Python, torch, data loading and the page cache.

    Args:
        plan_default_bytes: `host_bytes` of a plan derived without a limit.
        available: Bytes this process can have, from `memory_available`.
    """
    return min(plan_default_bytes, int(available * DEFAULT_SHARE))


def memory_available(root: Path = Path("/")) -> int:
    """Bytes this process can have: the least of what the machine has free and its groups allow.

    Counts the machine's MemTotal and MemAvailable, and the memory limit of this process's control
    group and of every group above it (cgroup v2 and v1). What other processes of the same group
    use is not taken off.

    Args:
        root: Where `proc` and `sys` are; tests give a folder of their own.

    Raises:
        ConfigError: The kernel's files say nothing; set the limit in bytes instead.
    """
    return _least([*_machine(root, "MemTotal", "MemAvailable"), *_groups(root)], root)


def memory_total(root: Path = Path("/")) -> int:
    """Bytes there are, in use or not: the least of the machine's and what its groups allow.

    What a limit is a fraction of, so that the same configuration means the same on every day.

    Args:
        root: As in `memory_available`.

    Raises:
        ConfigError: As in `memory_available`.
    """
    return _least([*_machine(root, "MemTotal"), *_groups(root)], root)


def _least(found: list[int], root: Path) -> int:
    if not found:
        raise ConfigError(
            f"cannot find out how much memory there is: neither {root / 'proc/meminfo'} nor a "
            f'control group says. Set {KEY} to a number of bytes, such as "6GiB"'
        )
    return min(found)


def _machine(root: Path, *names: str) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in names:
                with contextlib.suppress(ValueError, IndexError):
                    yield int(value.split()[0]) * KIB


def _groups(root: Path) -> Iterator[int]:
    """Every limit on the way up from our group. "max", or a file that is not there, is none."""
    for mount, group, file in _memberships(root):
        folder = mount / group
        # Seen from within a container the group's own path may not exist below the mount; the
        # folders above it, down to the mount itself, still say what binds us.
        while True:
            with contextlib.suppress(OSError, ValueError):
                yield int((folder / file).read_text(encoding="ascii"))
            if folder == mount:
                break
            folder = folder.parent


def _memberships(root: Path) -> Iterator[tuple[Path, PurePosixPath, str]]:
    """Gives (mount point, our group below it, name of the limit's file)."""
    lines = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        # A process outside its cgroup namespace sees "/../..": nothing above the mount is visible.
        group = PurePosixPath(*(part for part in name.split("/") if part not in ("", "..")))
        if controllers == "":
            yield mounts, group, "memory.max"
            yield mounts / "unified", group, "memory.max"
        elif "memory" in controllers.split(","):
            yield mounts / "memory", group, "memory.limit_in_bytes"


def _refused(value: object, reason: str) -> ConfigError:
    return ConfigError(
        f"{KEY}: {value!r:.100} is not allowed: {reason}. Allowed: bytes as a whole number, text "
        'such as "6GiB" or "500 MB", or a fraction of the memory there is, above 0 and up to 1. '
        "Leave it out for the default: what the plan needs, at most half of what is free"
    )
