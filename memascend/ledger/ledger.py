"""The ledger: every host byte of ours by component, planned and measured, and the drive traffic.

Plan and allocator use the same component names, so the table shows both for each component. The
rest of the process's memory (Python, torch, DeepSpeed) is a line of its own.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memascend.base.units import format_nbytes
from memascend.ledger.drives import DriveWear
from memascend.ledger.guesses import Guesses
from memascend.ledger.traffic import ActivationTraffic, VolumeTraffic
from memascend.ledger.wear import Wear
from memascend.plan.derive import Plan
from memascend.system.files import is_replaceable, replace_durably


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One component; `planned_bytes` is None if the plan does not have it."""

    component: str
    planned_bytes: int | None
    live_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Device memory of one component."""

    component: str
    planned_bytes: int
    live_bytes: int
    peak_bytes: int

    def describe(self) -> str:
        """Return one line for the log."""
        planned, peak = format_nbytes(self.planned_bytes), format_nbytes(self.peak_bytes)
        return f"device: {self.component} took at most {peak} of {planned} planned"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one rank at one moment."""

    rows: Sequence[LedgerRow]  # components, the largest first
    limit_bytes: int | None  # the stated limit, None without one
    held_bytes: int  # memory that the arena holds for the components, tails of pages included
    held_bytes_peak: int
    resident_bytes: int  # the process's resident memory now
    resident_bytes_peak: int
    drive: Mapping[str, int | float]  # counters of the store; empty without one
    unregistered_bytes: int = 0  # held memory that should be registered with the device and is not
    wear: Wear | None = None  # bytes that all ranks of this machine wrote; None without a store
    volumes: Sequence[VolumeTraffic] = ()  # traffic and latency of each; none without a store
    drives: Sequence[DriveWear] = ()  # wear of the drives below the volumes, from SMART data
    heap: str = ""  # the allocator behind malloc and its settings; empty if it was not examined
    device_bytes_peak: int | None = None  # peak allocated by torch; None if the device is the CPU
    activations: ActivationTraffic | None = None  # saved ones; None if they stay on the device
    #: Gradients that wait on the device; None if its copies block.
    gradients_on_device: DeviceRow | None = None
    guesses: Guesses | None = None  # steps begun during backward; None where none is a guess
    machine: str = ""  # name of the rank's machine

    @property
    def planned_bytes(self) -> int:
        """Planned bytes of all components."""
        return sum(row.planned_bytes or 0 for row in self.rows)

    @property
    def live_bytes(self) -> int:
        """Live bytes of all components."""
        return sum(row.live_bytes for row in self.rows)

    @property
    def other_bytes_peak(self) -> int:
        """Resident memory that is not ours, at the peak: Python, torch, DeepSpeed."""
        return max(0, self.resident_bytes_peak - self.held_bytes_peak)

    @property
    def peak_note(self) -> str:
        """Why some peaks are above the plan; empty if none is."""
        above = [
            row.component
            for row in self.rows
            if row.planned_bytes is not None and row.peak_bytes > row.planned_bytes
        ]
        if not above:
            return ""
        return (
            f"peak above planned ({', '.join(above)}): while the model is built, before its plan "
            "exists, these have fixed sizes"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the account for JSON."""
        return asdict(self) | {
            "peak_note": self.peak_note,
            "planned_bytes": self.planned_bytes,
            "live_bytes": self.live_bytes,
            "other_bytes_peak": self.other_bytes_peak,
            "volumes": [asdict(volume) for volume in self.volumes],
            "drives": [drive.as_dict() for drive in self.drives],
        }

    def write(self, path: str | Path) -> None:
        """Write the account as JSON; an older file is replaced.

        Raises:
            OSError: The file cannot be written, or the path is a device or a link.
        """
        path = Path(path)
        if not is_replaceable(path):
            raise FileExistsError(errno.EEXIST, "a link or device has that name", str(path))
        replace_durably(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def describe(self) -> str:
        """Return a table for the log."""
        lines = [("component", "planned", "now", "peak")]
        lines += [
            (
                row.component,
                "-" if row.planned_bytes is None else format_nbytes(row.planned_bytes),
                format_nbytes(row.live_bytes),
                format_nbytes(row.peak_bytes),
            )
            for row in self.rows
        ]
        limit = "no limit" if self.limit_bytes is None else format_nbytes(self.limit_bytes)
        lines += [
            (
                f"memascend ({limit})",
                format_nbytes(self.planned_bytes),
                format_nbytes(self.held_bytes),
                format_nbytes(self.held_bytes_peak),
            ),
            (
                "not ours: Python, torch, DeepSpeed",
                "-",
                format_nbytes(max(0, self.resident_bytes - self.held_bytes)),
                format_nbytes(self.other_bytes_peak),
            ),
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        table = [
            f"  {line[0]:<{widths[0]}}"
            + "".join(
                f"  {cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)
            )
            for line in lines
        ]
        if self.peak_note:
            table.append(f"  {self.peak_note}")
        if self.heap:
            table.append(f"  {self.heap}")
        if self.unregistered_bytes:
            held, missing = format_nbytes(self.held_bytes), format_nbytes(self.unregistered_bytes)
            table.append(f"  NOT registered with the device: {missing} of {held}; its copies block")
        if self.drive.get("bytes_verified"):
            table.append(f"  {self._describe_verified()}")
        table += [f"  {volume.describe()}" for volume in self.volumes]
        if self.volumes:
            table.append(f"  training waited {self.drive['wait_seconds']:.1f} s for the drives")
        if self.device_bytes_peak is not None:
            peak = format_nbytes(self.device_bytes_peak)
            table.append(f"  device: at most {peak} allocated by torch")
        if self.gradients_on_device is not None:
            table.append(f"  {self.gradients_on_device.describe()}")
        if self.activations is not None:
            table.append(f"  {self.activations.describe()}")
        if self.guesses is not None:
            table.append(f"  {self.guesses.describe()}")
        if self.wear is not None:
            table.append(f"  {self.wear.describe()}")
        survived = describe_faults(self.drive)
        if survived:
            table.append(f"  {survived}")
        table += [f"  drive {drive.describe()}" for drive in self.drives]
        return "\n".join(table)

    def _describe_verified(self) -> str:
        verified, read_back = self.drive["bytes_verified"], self.drive["bytes_read_back"]
        text = f"compared with checksums: {format_nbytes(int(verified))}"
        if read_back:
            text += f", of which {format_nbytes(int(read_back))} read back after a write"
        mismatches, corruptions = self.drive["mismatches"], self.drive["corruptions"]
        return f"{text}; {mismatches} mismatched, {corruptions} of them again on a second read"


#: Faults of drives that the run survived, by counters of the store.
_FAULTS = {
    "eio_retries": "tried again after an I/O error",
    "retries": "tried again after EAGAIN, ENOMEM or EINTR",
    "resubmitted": "short transfers continued",
    "stalls": "silences reported",
    "slow_spells": "spells of a drive far slower than the others",
}


def describe_faults(drive: Mapping[str, int | float]) -> str:
    """Return one line on the faults that the run survived; empty without any."""
    found = [f"{drive[name]} {what}" for name, what in _FAULTS.items() if drive.get(name)]
    return f"the drive's faults: {', '.join(found)}" if found else ""


def describe_plan(plan: Plan) -> str:
    """Return the plan as a table for the log."""
    rows = [(name, nbytes) for name, nbytes in plan.host.items() if nbytes]
    rows.sort(key=lambda row: -row[1])
    limit = "no limit" if plan.limit_bytes is None else f"limit {format_nbytes(plan.limit_bytes)}"
    rows.append((f"memascend ({limit})", plan.host_bytes))
    rows += list(plan.not_ours.items())
    rows.append(("on the drive", plan.drive_bytes))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {format_nbytes(nbytes):>11}" for name, nbytes in rows)
