"""The time of a step by phase, and the waits in each phase.

Pure arithmetic over the marks that a run recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memascend.ledger.trace import OPTIMIZER, PHASES, Mark


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase, of one step on average."""

    phase: str
    total_s: float
    drive_s: float  # seconds of it in which training waited for drives
    device_s: float  # seconds of it in which training waited for the device
    optimizer_s: float  # seconds of it in which training waited for background optimizer steps
    read_bytes: float  # bytes read from the drives meanwhile, by any thread
    written_bytes: float  # bytes written to the drives meanwhile, by any thread

    @property
    def computing_s(self) -> float:
        """Seconds without waits: arithmetic of model and optimizer, and Python."""
        return max(0.0, self.total_s - self.drive_s - self.device_s - self.optimizer_s)


def phase_times(marks: Sequence[Mark]) -> list[PhaseTime]:
    """Return the phases of the mean step.

    The first step is left out if there are others, since it is unlike them. Marks after the last
    step are left out, too. Empty without a step.
    """
    ends = [index for index, mark in enumerate(marks) if mark.phase == OPTIMIZER]
    if not ends:
        return []
    first = ends[0] if len(ends) > 1 else _first_of_step(marks)
    spans = list(pairwise(marks[first : ends[-1] + 1]))
    count = max(1, len(ends) - 1)
    return [_mean(phase, spans, count) for phase in PHASES]


def _first_of_step(marks: Sequence[Mark]) -> int:
    """Return the last mark before the first phase of a step."""
    first = next(index for index, mark in enumerate(marks) if mark.phase in PHASES)
    return max(0, first - 1)


def _mean(phase: str, spans: Sequence[tuple[Mark, Mark]], count: int) -> PhaseTime:
    mine = [(before, after) for before, after in spans if after.phase == phase]

    def grown(name: str) -> float:
        return sum(
            float(getattr(after.measures, name) - getattr(before.measures, name))
            for before, after in mine
        )

    return PhaseTime(
        phase=phase,
        total_s=sum(after.time_s - before.time_s for before, after in mine) / count,
        drive_s=grown("drive_wait_s") / count,
        device_s=grown("device_wait_s") / count,
        optimizer_s=grown("optimizer_wait_s") / count,
        read_bytes=grown("read_bytes") / count,
        written_bytes=grown("written_bytes") / count,
    )
