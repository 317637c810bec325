"""Converts byte counts to text and back ("6GiB" <-> 6442450944), and to whole pages.

Pure; imports nothing of ours but errors.
"""

from __future__ import annotations

import re

from memascend.errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB
#: Granule of host memory: planned, allocated and transferred sizes are multiples of it.
PAGE_BYTES = 4 * KIB
#: Larger than any file or memory.
NBYTES_MAX = 1 << 63

_FACTORS = {
    "": 1,
    "B": 1,
    "K": KIB,
    "KIB": KIB,
    "KB": 1000,
    "M": MIB,
    "MIB": MIB,
    "MB": 1000**2,
    "G": GIB,
    "GIB": GIB,
    "GB": 1000**3,
    "T": TIB,
    "TIB": TIB,
    "TB": 1000**4,
}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([A-Za-z]*)")


def parse_nbytes(value: int | str) -> int:
    """Convert 1048576, "1MiB" or "1.5 GB" to bytes; raise ConfigError for any other text."""
    if isinstance(value, bool):
        raise ConfigError(f"not a byte count: {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"a byte count cannot be negative: {value}")
        return value
    match = _PATTERN.fullmatch(value.strip())
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if value.strip().startswith("-"):
        raise ConfigError(f"a byte count cannot be negative: {value[:40]!r}")
    if match is None or factor is None:
        raise ConfigError(
            f"not a byte count: {value[:40]!r}. Write a number of bytes, or a number with one of "
            "KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (powers of 1000)"
        )
    nbytes = float(match.group(1)) * factor
    if nbytes >= NBYTES_MAX:
        raise ConfigError(f"not a byte count: {value[:40]!r} is too large")
    return int(nbytes)


def format_nbytes(nbytes: int | float) -> str:
    """Return "1.50 GiB" for 1610612736: powers of 1024, two decimal places."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def page_up(nbytes: int) -> int:
    """Round up to a multiple of the page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def page_down(nbytes: int) -> int:
    """Round down to a multiple of the page."""
    return nbytes // PAGE_BYTES * PAGE_BYTES


def power_of_two_up(number: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0
