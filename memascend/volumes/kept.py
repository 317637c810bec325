"""Measurements of drives that are kept in the user's cache folder, by the identity of each drive.

Needs no native core, so that `memascend plan` can read them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from memascend.base.json_text import parse_json
from memascend.base.units import MIB
from memascend.system.files import replace_durably
from memascend.system.mounts import SYSFS, block_folder, device_number, read_line

log = logging.getLogger(__name__)

#: Rates of drives that `memascend volume bench --sustained` has measured.
RATES_FILE = "drive-rates.json"
#: Rates of a measurement of some seconds, which a write cache may have taken.
SHORT_RATES_FILE = "drive-rates-short.json"
_ENTRY_COUNT_MAX = 64
_FILE_BYTES_MAX = 1 * MIB
#: An entry of a file: weights, or rates in GB/s and the day of their measurement as an ordinal.
_NUMBERS = TypeAdapter(list[Annotated[float, Field(strict=True, gt=0, le=1_000_000)]])


@dataclass(frozen=True, slots=True)
class KeptRates:
    """Sustained rates in 10^9 bytes per second: of one drive, or the sums of several."""

    read_gb_s: float
    write_gb_s: float
    mixed_gb_s: float  # reads and writes at the same time, as many bytes of each, both counted
    #: When they were measured: of several drives the first day; None: now.
    day: date | None = field(default=None, compare=False)


def keep_rates(path: str, rates: KeptRates, *, cache: Path, name: str = RATES_FILE) -> None:
    """Keep the rates of the drive below a path in a file of the cache folder.

    They replace earlier ones, with the day of today.
    """
    file = cache / name
    found = [round(rate, 3) for rate in (rates.read_gb_s, rates.write_gb_s, rates.mixed_gb_s)]
    found.append(date.today().toordinal())
    with contextlib.suppress(OSError):  # write_kept tells that nothing was kept
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_kept(file, read_kept(file) | {identity(path): found})


def kept_rates(paths: Sequence[str], *, cache: Path, name: str = RATES_FILE) -> KeptRates | None:
    """Return the sums of the rates of the drives below the paths; None if one was not measured.

    Several paths on one drive count once.
    """
    known = read_kept(cache / name)
    try:
        drives = list(dict.fromkeys(identity(path) for path in paths))
    except OSError:  # a path of another machine
        return None
    found = [known.get(drive, []) for drive in drives]
    if not found or any(len(rates) != 4 for rates in found):
        return None
    read, write, mixed, days = map(list, zip(*found, strict=True))
    return KeptRates(sum(read), sum(write), sum(mixed), date.fromordinal(max(1, int(min(days)))))


def identity(path: str, sysfs: Path = SYSFS) -> str:
    """Return the identity of a path's drive: its serial number if known, and its size."""
    block = block_folder(path, sysfs)
    if block is None:
        system = os.statvfs(path)
        return f"device {device_number(path)}, {system.f_blocks * system.f_frsize} bytes"
    size = read_line(block / "size")
    for folder in (block, block.parent):  # a partition's parent is its drive
        for name in ("wwid", "device/wwid", "serial", "device/serial"):  # wwid: of a namespace
            serial = read_line(folder / name)
            if serial:
                return f"{os.path.basename(name)} {serial}, {size} sectors"
    return f"device {device_number(path)}, {size} sectors"


def read_kept(path: Path) -> dict[str, list[float]]:
    """Return the entries of a file that are lists of numbers; empty if it is damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = parse_json(file.read(_FILE_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    entries = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        with contextlib.suppress(ValidationError):
            entries[key] = _NUMBERS.validate_python(value)
    return entries


def write_kept(path: Path, entries: Mapping[str, Sequence[float]]) -> None:
    """Replace a file, with the newest entries; if it cannot be written, nothing is kept."""
    newest = dict(list(entries.items())[-_ENTRY_COUNT_MAX:])
    try:
        replace_durably(path, json.dumps(newest, indent=1), mode=0o600)
    except OSError as error:
        log.debug("volumes: cannot keep the measurement in %s: %s", path, error)
