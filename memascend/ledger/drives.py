"""The wear of drives from their own SMART data, read with smartctl where it is installed.

Knows one program and its JSON; nothing of runs. Nothing here raises, and each call has a timeout: a
drive without SMART data gets a text with the reason. For any thread, never within a training step.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any

from memascend.base.json_text import parse_json
from memascend.base.units import format_nbytes
from memascend.system.mounts import drives_below

SMARTCTL_TIMEOUT_S = 5.0
#: Each smartctl gets at least this long, even after the others have used up the timeout.
_ANSWER_TIMEOUT_S = 0.1
DRIVES_MAX = 16
#: SMART gives whole percents: below this an estimate of the remaining endurance is too coarse.
USED_PERCENT_MIN = 2
#: A shorter run gives no rate.
RUN_SECONDS_MIN = 60.0
#: Warn from this percentage on: plan for a new drive.
USED_PERCENT_HIGH = 80
NO_SMARTCTL = "smartctl (smartmontools) is not installed"

_SECONDS_PER_DAY = 86_400
_TB = 10**12  # the unit in which makers state endurance
_NVME_UNIT_BYTES = 512_000  # "in thousands of 512-byte units", NVMe specification
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
#: Bits of smartctl's exit status: the command line, opening the device, the SMART command.
_FAILED_STATUS = 0b111
#: ATA attributes that count written data, with the bytes of one unit; None: a logical sector.
_WRITTEN_UNITS = {
    "Total_LBAs_Written": None,
    "Host_Writes_32MiB": 32 << 20,
    "Lifetime_Writes_GiB": 1 << 30,
    "Total_Writes_GiB": 1 << 30,
    "Host_Writes_GiB": 1 << 30,
}
#: ATA attributes whose normalized value is the remaining endurance: from 100 (new) down to 0.
_LEFT_NAMES = (
    "Percent_Lifetime_Remain",
    "Wear_Leveling_Count",
    "Media_Wearout_Indicator",
    "SSD_Life_Left",
)


@dataclass(frozen=True, slots=True)
class DriveWear:
    """The wear of one drive, from its own SMART data."""

    name: str  # the kernel's name, such as "nvme0n1"
    model: str = ""  # the maker's name of the model
    used_percent: int | None = None  # the drive's estimate of the endurance used up; may exceed 100
    life_written_bytes: int | None = None  # bytes written over the drive's life, by all programs
    run_written_bytes: int | None = None  # bytes written between two reports; None before then
    run_seconds: float | None = None  # seconds between the two reports

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may still be written, estimated from `used_percent`; None if unknown."""
        used, written = self.used_percent, self.life_written_bytes
        if used is None or written is None or used < USED_PERCENT_MIN:
            return None
        return written * max(0, 100 - used) // used

    @property
    def days_left(self) -> float | None:
        """Days until the endurance is used up at the rate of this run; None if unknown.

        The rate includes the writes of other programs during the run.
        """
        if self.left_bytes is None or not self.run_written_bytes:
            return None
        if self.run_seconds is None or self.run_seconds < RUN_SECONDS_MIN:
            return None
        return self.left_bytes / self.run_written_bytes * self.run_seconds / _SECONDS_PER_DAY

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and both estimates, for JSON."""
        return asdict(self) | {"left_bytes": self.left_bytes, "days_left": self.days_left}

    def describe(self) -> str:
        """Return one line for the log."""
        parts = []
        if self.used_percent is not None:
            parts.append(f"{self.used_percent} % of its endurance used")
        if self.life_written_bytes is not None:
            parts.append(f"{self.life_written_bytes / _TB:.1f} TB written in its life")
        if self.run_written_bytes is not None:
            parts.append(f"{format_nbytes(self.run_written_bytes)} of them during this run")
        if self.left_bytes is not None:
            parts.append(f"about {self.left_bytes / _TB:.0f} TB left")
        if self.days_left is not None:
            parts.append(f"{self.days_left:.0f} days at this rate")
        model = f" ({self.model})" if self.model else ""
        return f"{self.name}{model}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class DriveReport:
    """The wear of several drives; `silent` maps each drive without SMART data to the reason."""

    drives: tuple[DriveWear, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)

    def why_silent(self) -> str:
        """Return the reasons in one line; empty if every drive has SMART data."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.silent.items())


class DriveWatch:
    """The drives of a run: read once when it starts, and once when it ends."""

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        read: Callable[[list[str]], DriveReport] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._paths = [os.fspath(path) for path in paths]
        self._read, self._clock = read or read_drives, clock
        self.start = self._read(self._paths)
        self.drives = self.start.drives
        self._began = clock()

    def end(self) -> None:
        """Read the drives again; `drives` then has the bytes written since the start."""
        if not self.start.drives:
            return
        before = {drive.name: drive for drive in self.start.drives}
        self.drives = tuple(
            _since(before.get(drive.name), drive, self._clock() - self._began)
            for drive in self._read(self._paths).drives
        )


def read_drives(paths: Iterable[str | os.PathLike[str]]) -> DriveReport:
    """Return the wear of the drives below some directories and block devices."""
    names = sorted({name for path in paths for name in drives_below(path)})[:DRIVES_MAX]
    if not names:
        return DriveReport(silent={"drives": "none was found below the volumes"})
    smartctl = shutil.which("smartctl") or shutil.which("smartctl", path=_SBIN)
    if smartctl is None:
        return DriveReport(silent={", ".join(names): NO_SMARTCTL})
    started = {name: _start(name, smartctl) for name in names}
    end = monotonic() + SMARTCTL_TIMEOUT_S
    answers = {
        name: process if isinstance(process, str) else _answer(name, process, end - monotonic())
        for name, process in started.items()
    }
    return DriveReport(
        tuple(answer for answer in answers.values() if isinstance(answer, DriveWear)),
        {name: answer for name, answer in answers.items() if isinstance(answer, str)},
    )


def _start(name: str, smartctl: str) -> subprocess.Popen[bytes] | str:
    try:
        return subprocess.Popen(
            [smartctl, "-j", "-a", f"/dev/{name}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        return f"smartctl cannot be run: {error.strerror}"


def _answer(name: str, process: subprocess.Popen[bytes], seconds: float) -> DriveWear | str:
    """Return the wear of one drive, or the reason why it is unknown."""
    try:
        text, _ = process.communicate(timeout=max(_ANSWER_TIMEOUT_S, seconds))
    except subprocess.TimeoutExpired:
        process.kill()  # without wait(): a process that hangs in the kernel does not end
        if process.stdout is not None:
            process.stdout.close()
        return f"smartctl gave no answer within {SMARTCTL_TIMEOUT_S:g} s"
    try:
        answer = parse_json(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return f"smartctl ended with status {process.returncode} and no JSON; version 7 is needed"
    return parse(name, answer, status=process.returncode)


def parse(name: str, answer: Mapping[str, Any], *, status: int = 0) -> DriveWear | str:
    """Return the wear in the output of `smartctl -j -a`, or the reason why there is none."""
    used, written = _nvme(answer)
    if used is None and written is None:
        used, written = _ata(answer)
    newer = _whole(_at(answer, "endurance_used", "current_percent"))
    used = newer if newer is not None else used
    if used is None and written is None:
        return _reason(answer, status)
    model = answer.get("model_name")
    return DriveWear(name, model if isinstance(model, str) else "", used, written)


def _since(before: DriveWear | None, now: DriveWear, seconds: float) -> DriveWear:
    if before is None or before.life_written_bytes is None or now.life_written_bytes is None:
        return now
    written_bytes = max(0, now.life_written_bytes - before.life_written_bytes)
    return replace(now, run_written_bytes=written_bytes, run_seconds=seconds)


def _nvme(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    log = "nvme_smart_health_information_log"
    units = _whole(_at(answer, log, "data_units_written"))
    written = None if units is None else units * _NVME_UNIT_BYTES
    return _whole(_at(answer, log, "percentage_used")), written


def _ata(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    table = _at(answer, "ata_smart_attributes", "table")
    sector_bytes = _whole(answer.get("logical_block_size")) or 512
    used = written = None
    for row in table if isinstance(table, list) else ():
        name = str(_at(row, "name"))
        left, raw = _whole(_at(row, "value")), _whole(_at(row, "raw", "value"))
        if name in _LEFT_NAMES and used is None and left is not None and left <= 100:
            used = 100 - left
        if name in _WRITTEN_UNITS and written is None and raw is not None:
            written = raw * (_WRITTEN_UNITS[name] or sector_bytes)
    return used, written


def _reason(answer: Mapping[str, Any], status: int) -> str:
    """Return why smartctl's output has no wear."""
    messages = _at(answer, "smartctl", "messages")
    listed = messages if isinstance(messages, list) else []
    texts = [_at(message, "string") for message in listed]
    reasons = "; ".join(text for text in texts if isinstance(text, str))
    if status & _FAILED_STATUS:
        return reasons or f"smartctl ended with status {status}"
    return reasons or "its SMART data has neither the endurance used nor the bytes written"


def _at(answer: object, *keys: str) -> Any:
    """Return a value in nested objects; None where a key is missing."""
    for key in keys:
        answer = answer.get(key) if isinstance(answer, Mapping) else None
    return answer


def _whole(value: object) -> int | None:
    """Return a count; None for any other value, as damaged output may hold."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 128
    return value if is_count and isinstance(value, int) else None
