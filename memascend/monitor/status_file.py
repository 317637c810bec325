"""Writes the status of one rank at intervals, from the thread that trains.

Keeps the times of the last steps only. Writes when a phase of a step begins, at most once a second.
An error here never stops training; the first one is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, time

from memascend.ledger.ledger import Ledger
from memascend.ledger.traffic import VolumeTraffic
from memascend.monitor.bottleneck import describe_bottleneck
from memascend.monitor.clock import STEPS_AVERAGED, StepClock
from memascend.monitor.runs import make_run, rank_path
from memascend.monitor.status import FINISHED, Status, VolumeRate, as_json, rates_between
from memascend.system.files import replace_whole
from memascend.system.identity import identify

log = logging.getLogger(__name__)

#: Least time between two writes.
INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank's status."""

    root: Path  # folder of runs
    is_shared: bool  # True if the user named the root
    run: str
    rank: int
    world_size: int
    program: str  # name of the training program

    @property
    def path(self) -> Path:
        """Path of the rank's file."""
        return rank_path(self.root, self.run, self.rank)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of training."""

    step: int = 0  # optimizer steps so far
    steps_total: int | None = None  # steps of the learning-rate schedule; None if it has no end
    samples: float = 0.0  # samples of this rank in one step


class StatusFile:
    """The status file of one rank, created at the first write. No method raises."""

    def __init__(
        self,
        place: RankPlace,
        read_ledger: Callable[[], Ledger],
        *,
        read_drive: Callable[[], Mapping[str, int | float]] = dict,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.place, self._read_ledger, self._read_drive = place, read_ledger, read_drive
        self._clock, self._steps = clock, StepClock(clock)
        self._progress = Progress()
        self._tokens = self._tokens_of_step = 0
        self._drive: Mapping[str, int | float] = {}  # counters at the end of the last step
        self._moved: dict[str, float] = {}  # bytes of the last step
        self._process = identify(os.getpid())
        self._started_at = time()
        self._written = 0.0  # time of the last write, on the clock
        self._traffic: tuple[VolumeTraffic, ...] = ()
        self._rates: list[VolumeRate] = []
        self._count = 0  # steps of this process
        self._window: tuple[float, Sequence[VolumeTraffic]] = (0.0, ())
        self._is_begun = self._has_folder = self._has_failed = False

    def begin_forward(self, *, after_backward: bool, count_tokens: Callable[[], int]) -> None:
        """Note that a forward pass begins, and whether backward has run since the last one."""

        def note() -> None:
            drive = self._read_drive()
            self._drive = self._drive or drive
            waited = drive.get("wait_seconds", 0.0)
            self._steps.begin_forward(after_backward=after_backward, waited=waited)
            self._tokens += count_tokens()

        self.attempt(note)
        self._write_if_due()

    def end_forward(self) -> None:
        """Note the end of a forward pass."""
        self._steps.end_forward()
        self._write_if_due()

    def begin_step(self) -> None:
        """Note that the engine's step begins."""
        self._steps.begin_step()
        self._write_if_due()

    def end_step(self, read_progress: Callable[[], Progress] | None) -> None:
        """Note the end of the engine's step; there is no progress between micro-batches."""

        def note() -> None:
            drive = self._read_drive()
            waited = drive.get("wait_seconds", 0.0)
            self._steps.end_step(is_boundary=read_progress is not None, waited=waited)
            if read_progress is not None:
                self._moved = {
                    name: drive[name] - self._drive.get(name, 0)
                    for name in ("bytes_read", "bytes_written")
                    if name in drive
                }
                self._drive = drive
                self._tokens_of_step, self._tokens = self._tokens, 0
                self._progress = read_progress()
                self._note_bottleneck()

        self.attempt(note)
        self._write_if_due()

    def last_step(self) -> dict[str, float]:
        """Return the measurements of the last step, for logs; empty before the first."""
        times = self._steps.last
        if times is None:
            return {}
        ledger = self._read_ledger()
        found = {"step_seconds": times.total}
        found |= {f"{name}_seconds": seconds for name, seconds in asdict(times).items()}
        if self._tokens_of_step:
            found["tokens_per_second"] = self._tokens_of_step / times.total
        return found | {
            "host_memory_bytes": float(ledger.held_bytes),
            "resident_memory_bytes": float(ledger.resident_bytes),
            **self._moved,
        }

    def finish(self) -> None:
        """Write that the rank has finished, if it has a file."""
        if self._has_folder and os.getpid() == self._process.pid:
            self.attempt(lambda: self._write(self._clock(), FINISHED))

    def _note_bottleneck(self) -> None:
        """Log once, on rank 0, if a drive is the bottleneck."""
        self._count += 1
        begins, ends = self._count == 1, self._count == 1 + STEPS_AVERAGED
        if self.place.rank != 0 or not (begins or ends):
            return
        now, volumes = self._clock(), self._read_ledger().volumes
        since, before = self._window
        if begins:
            self._window = now, volumes
        elif volumes and self._steps.mean is not None and now > since:
            rates = rates_between(before, volumes, now - since)
            text = describe_bottleneck(self._steps.mean, rates, step_count=STEPS_AVERAGED)
            log.info("memascend: %s", text)

    def _write_if_due(self) -> None:
        now = self._clock()
        is_first = not self._is_begun
        if is_first or (self._has_folder and now - self._written >= INTERVAL_S):
            self.attempt(lambda: self._write(now, self._steps.phase))

    def attempt(self, action: Callable[[], object]) -> None:
        """Run an action that training does not depend on; log its first error."""
        try:
            action()
        except Exception as error:
            if self._has_failed:
                return
            self._has_failed = True
            log.warning(
                "memascend: rank %d: no status for `memascend monitor` in %s or for logs: %s. "
                'Training continues; "status" in the block names another folder, or false for none',
                self.place.rank,
                self.place.path.parent,
                error,
            )

    def _write(self, now: float, phase: str) -> None:
        ledger = self._read_ledger()
        seconds = now - self._written
        if len(self._traffic) != len(ledger.volumes):  # none yet, as at the first time
            self._rates = []
        elif phase != FINISHED:
            self._rates = rates_between(self._traffic, ledger.volumes, seconds)
        self._traffic, self._written = tuple(ledger.volumes), now
        if not self._is_begun:
            # Tried once: a folder that was refused may be another user's, and a link to anywhere.
            self._is_begun = True
            make_run(self.place.root, self.place.run, is_shared=self.place.is_shared)
            self._has_folder = True
        replace_whole(self.place.path, as_json(self._status(ledger, phase)))

    def _status(self, ledger: Ledger, phase: str) -> Status:
        mean, progress = self._steps.mean, self._progress
        rate = 1 / mean.total if mean is not None and mean.total > 0 else None
        return Status(
            program=self.place.program,
            run=self.place.run,
            rank=self.place.rank,
            world_size=self.place.world_size,
            process=self._process,
            started_at=self._started_at,
            written_at=time(),
            phase=phase,
            phase_seconds=0.0 if phase == FINISHED else self._steps.phase_seconds,
            step=progress.step,
            steps_total=progress.steps_total,
            last=self._steps.last,
            mean=mean,
            samples_per_second=None if rate is None else progress.samples * rate,
            tokens_per_second=(self._tokens_of_step * rate if rate else None) or None,
            rates=self._rates,
            ledger=ledger,
        )
