"""What a rank says of itself while it trains, as one JSON document.

Knows the account and times, not who measures them. Written and read by the same classes: what a
reader does not know it leaves out, what is missing or of another kind is an error.
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

#: What a rank is doing, besides the phases of a step.
FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class VolumeRate:
    """What one volume moved of late.

    Attributes:
        path: Its directory or device.
        read: Bytes per second.
        written: Bytes per second.
        busy: Part of the time with requests in flight.
    """

    path: str
    read: float
    written: float
    busy: float


@dataclass(frozen=True, slots=True)
class Status:
    """One rank at one moment.

    Attributes:
        program: What it runs.
        run: Name of the run, the same on every rank.
        rank: Its number.
        world_size: Number of ranks.
        process: Who wrote this.
        started_at: When the rank was ready to train, in seconds since 1970.
        written_at: When this was written.
        phase: Of the step, or "finished".
        phase_seconds: For how long.
        step: Optimizer steps so far, those before a resume included.
        steps_total: As the learning-rate schedule has them; None where it has no end.
        last: Times of the last step; None before the first.
        mean: Of the last steps.
        samples_per_second: Of this rank; sums over the ranks are those of the run.
        tokens_per_second: Likewise, padding included; None where the model gets no tokens.
        rates: Of each volume, since the document before this.
        ledger: The account of memory and traffic.
        version: Of the document; another one is not read.
    """

    program: str
    run: str
    rank: int
    world_size: int
    process: ProcessIdentity
    started_at: float
    written_at: float
    phase: str
    phase_seconds: float
    step: int
    steps_total: int | None
    last: StepTimes | None
    mean: StepTimes | None
    samples_per_second: float | None
    tokens_per_second: float | None
    rates: Sequence[VolumeRate]
    ledger: Ledger
    version: Literal[1] = 1

    @property
    def is_finished(self) -> bool:
        """Whether the rank came to its end."""
        return self.phase == FINISHED

    @property
    def seconds_left(self) -> float | None:
        """Until the schedule's last step; None while unknown."""
        if self.steps_total is None or self.mean is None or self.is_finished:
            return None
        return max(0, self.steps_total - self.step) * self.mean.total


_ADAPTER = TypeAdapter(Status)


def as_json(status: Status) -> str:
    """Return the document."""
    return _ADAPTER.dump_json(status).decode()


def read_status(path: Path) -> Status:
    """Read a document.

    Raises:
        ConfigError: It cannot be read, or is something else.
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
    """Return what each volume moved between two accounts."""
    found = []
    for old, new in zip(before, now, strict=True):
        found.append(
            VolumeRate(
                path=new.path,
                read=(new.bytes_read - old.bytes_read) / seconds,
                written=(new.bytes_written - old.bytes_written) / seconds,
                busy=min(1.0, (new.busy_s - old.busy_s) / seconds),
            )
        )
    return found
