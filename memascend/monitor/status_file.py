"""Writes the status of one rank now and then, from the thread that trains.

Holds no history but that of the last steps, and writes at most once a second, whenever a phase of a
step begins. Nothing here ends a training: what fails is said once.
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
    """Where the status of a rank goes, and whose it is.

    Attributes:
        root: Of runs.
        is_shared: Whether the user named it.
        run: Name of the run.
        rank: Number of the rank.
        world_size: Number of ranks.
        program: What it runs.
    """

    root: Path
    is_shared: bool
    run: str
    rank: int
    world_size: int
    program: str

    @property
    def path(self) -> Path:
        """The file."""
        return rank_path(self.root, self.run, self.rank)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training is.

    Attributes:
        step: Optimizer steps so far.
        steps_total: Of the schedule; None where it has no end.
        samples: Of the last step, this rank's part.
    """

    step: int = 0
    steps_total: int | None = None
    samples: float = 0.0


class StatusFile:
    """The file of one rank, made when it is first written. No method raises."""

    def __init__(
        self,
        place: RankPlace,
        read_ledger: Callable[[], Ledger],
        *,
        read_drive: Callable[[], Mapping[str, int | float]] = dict,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Begin without a file.

        Args:
            place: Where it goes.
            read_ledger: Gives the account.
            read_drive: Gives the counters of the store; empty without one.
            clock: Gives seconds.
        """
        self.place, self._read_ledger, self._read_drive = place, read_ledger, read_drive
        self._clock, self._steps = clock, StepClock(clock)
        self._progress = Progress()
        self._tokens = self._tokens_of_step = 0
        self._drive: Mapping[str, int | float] = {}  # when the last step ended
        self._moved: dict[str, float] = {}  # in the last step
        self._process = identify(os.getpid())
        self._started_at = time()
        self._written = 0.0  # by the clock
        self._traffic: tuple[VolumeTraffic, ...] = ()
        self._rates: list[VolumeRate] = []
        self._count = 0  # of the steps that this process made
        self._window: tuple[float, Sequence[VolumeTraffic]] = (0.0, ())
        self._is_begun = self._has_folder = self._has_failed = False

    def begin_forward(self, *, after_backward: bool, count_tokens: Callable[[], int]) -> None:
        """Note that a forward pass begins.

        Args:
            after_backward: Whether a backward pass came since the last one.
            count_tokens: Gives the tokens that it is about.
        """

        def note() -> None:
            drive = self._read_drive()
            self._drive = self._drive or drive
            waited = drive.get("wait_seconds", 0.0)
            self._steps.begin_forward(after_backward=after_backward, waited=waited)
            self._tokens += count_tokens()

        self.attempt(note)
        self._write_if_due()

    def end_forward(self) -> None:
        """Note that it has ended."""
        self._steps.end_forward()
        self._write_if_due()

    def begin_step(self) -> None:
        """Note that the engine's step begins."""
        self._steps.begin_step()
        self._write_if_due()

    def end_step(self, read_progress: Callable[[], Progress] | None) -> None:
        """Note that it has ended.

        Args:
            read_progress: Says how far the training is; None after one micro-batch among others.
        """

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
        """Return the last step in numbers, for logs; empty before the first."""
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
        """Say that the rank is through, where anything was said at all."""
        if self._has_folder and os.getpid() == self._process.pid:
            self.attempt(lambda: self._write(self._clock(), FINISHED))

    def _note_bottleneck(self) -> None:
        """Log once, on rank 0, what the drives have to do with the time of a step."""
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
        """Do what is of no use to training itself, and log once why it failed."""
        try:
            action()
        except Exception as error:
            if self._has_failed:
                return
            self._has_failed = True
            log.warning(
                "memascend: rank %d: no status for `memascend monitor` in %s or for logs: %s. "
                'Training goes on; "status" in the block names another folder, or false for none',
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
            # Tried once: one that was refused may be somebody else's, and leads anywhere.
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
