"""The status that a rank writes while it trains, as one JSON document.

Knows the ledger and the times, not how they are measured. The same classes write and read it. A
reader ignores fields that it does not know; a missing field, or one of a wrong type, is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from memascend.errors import ConfigError
from memascend.ledger.ledger import Ledger
from memascend.ledger.traffic import VolumeTraffic
from memascend.monitor.clock import StepTimes
from memascend.system.identity import ProcessIdentity

#: Value of `phase` besides the phases of a step.
FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class VolumeRate:
    """The recent traffic of one volume."""

    path: str  # its directory or device
    read: float  # bytes read per second
    written: float  # bytes written per second
    busy: float  # part of the time with requests in flight


@dataclass(frozen=True, slots=True)
class Status:
    """One rank at one moment."""

    program: str  # name of the training program
    run: str  # name of the run, the same on every rank
    rank: int
    world_size: int
    process: ProcessIdentity  # the process that wrote this
    started_at: float  # time at which the rank was ready to train, in seconds since 1970
    written_at: float  # time of this status, in seconds since 1970
    phase: str  # phase of the step, or "finished"
    phase_seconds: float  # seconds since the phase began
    step: int  # optimizer steps so far, those before a resume included
    steps_total: int | None  # steps of the learning-rate schedule; None if it has no end
    last: StepTimes | None  # times of the last step; None before the first
    mean: StepTimes | None  # mean times of the last steps
    samples_per_second: float | None  # of this rank; the sum over the ranks is the run's rate
    tokens_per_second: float | None  # with padding; None if the model gets no tokens
    rates: Sequence[VolumeRate]  # rates of each volume since the last status
    ledger: Ledger
    version: Literal[1] = 1  # version of the document; other versions are refused

    @property
    def is_finished(self) -> bool:
        """True if the rank has finished."""
        return self.phase == FINISHED

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the schedule's last step; None if unknown."""
        if self.steps_total is None or self.mean is None or self.is_finished:
            return None
        return max(0, self.steps_total - self.step) * self.mean.total


_ADAPTER = TypeAdapter(Status)


def as_json(status: Status) -> str:
    """Return the status as a JSON document."""
    return _ADAPTER.dump_json(status).decode()


def read_status(path: Path) -> Status:
    """Read a status.

    Raises:
        ConfigError: The file cannot be read, or is not a status of this version.
    """
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the status {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise ConfigError(
            f"{path} is not a status that this version reads: {place}: {first['msg']}. likely "
            "cause: another program, or another version of memascend, wrote it"
        ) from error


def rates_between(
    before: Sequence[VolumeTraffic], now: Sequence[VolumeTraffic], seconds: float
) -> list[VolumeRate]:
    """Return the rates of each volume between two accounts."""
    return [
        VolumeRate(
            path=new.path,
            read=(new.bytes_read - old.bytes_read) / seconds,
            written=(new.bytes_written - old.bytes_written) / seconds,
            busy=min(1.0, (new.busy_s - old.busy_s) / seconds),
        )
        for old, new in zip(before, now, strict=True)
    ]
