"""SSD wear: the bytes that a run writes, against the drives' endurance and the user's budget.

Writing wears flash out, and a step of full fine-tuning writes 14 bytes or more per parameter: a
long run can use up a consumer drive. Pure; the caller gives the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from memascend.base.units import format_nbytes

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Wear:
    """The account at one moment."""

    written_bytes: int  # bytes written by all ranks of this machine, which are taken to be alike
    step_bytes: int  # mean of the bytes of one optimizer step; excludes writing the initial model
    steps: int  # optimizer steps so far
    seconds: float  # seconds since the first step ended
    endurance_bytes: int | None = None  # bytes that may still be written, if they are stated
    budget_bytes: int | None = None  # bytes that this run may write; None without a budget

    @property
    def endurance_share(self) -> float | None:
        """Part of the stated endurance that this run has used; None if none was stated."""
        return None if self.endurance_bytes is None else self.written_bytes / self.endurance_bytes

    @property
    def days_left(self) -> float | None:
        """Days until the stated endurance is used up at this run's rate; None while unknown."""
        if self.endurance_bytes is None or self.steps < 2 or not self.step_bytes:
            return None
        left_bytes = max(0, self.endurance_bytes - self.written_bytes)
        seconds_per_step = self.seconds / (self.steps - 1)
        return left_bytes / self.step_bytes * seconds_per_step / _SECONDS_PER_DAY

    @property
    def is_over_budget(self) -> bool:
        """True if the run has written more than its budget."""
        return self.budget_bytes is not None and self.written_bytes > self.budget_bytes

    def describe(self) -> str:
        """Return one line for the log."""
        text = f"written to the drive: {format_nbytes(self.written_bytes)}"
        if self.step_bytes:
            text += f", {format_nbytes(self.step_bytes)} in each of {self.steps} steps"
        if self.budget_bytes is not None:
            part = self.written_bytes / self.budget_bytes
            text += f"; {part:.2%} of the budget of {format_nbytes(self.budget_bytes)}"
        if self.endurance_share is not None:
            text += f"; {self.endurance_share:.4%} of the stated endurance"
        if self.days_left is not None:
            text += f", of which {self.days_left:.0f} days are left at this rate"
        return text


class WearMeter:
    """A counter of steps; the caller gives the bytes written so far."""

    def __init__(
        self,
        *,
        endurance_bytes: int | None = None,
        budget_bytes: int | None = None,
        ranks: int = 1,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._endurance_bytes, self._budget_bytes = endurance_bytes, budget_bytes
        self._ranks, self._clock = ranks, clock
        self._steps = 0
        # Time and bytes written at the end of the first step. The last writes of a step may still
        # be in flight then, so only ends of steps are compared with each other.
        self._first_ended: tuple[float, int] = (0.0, 0)
        self._last_ended_bytes = 0
        self._is_reported = False

    def note_step(self, written_bytes: int) -> Wear | None:
        """Count a step of this rank; return the account when the budget is first exceeded."""
        self._steps += 1
        if self._steps == 1:
            self._first_ended = self._clock(), written_bytes
        self._last_ended_bytes = written_bytes
        if self._budget_bytes is None or self._is_reported:
            return None
        found = self.read(written_bytes)
        self._is_reported = found.is_over_budget
        return found if found.is_over_budget else None

    def read(self, written_bytes: int) -> Wear:
        """Return the account for a rank that has written so many bytes."""
        began, before_bytes = self._first_ended
        between_bytes = self._last_ended_bytes - before_bytes
        later = self._steps - 1
        return Wear(
            written_bytes=written_bytes * self._ranks,
            step_bytes=between_bytes * self._ranks // later if later > 0 else 0,
            steps=self._steps,
            seconds=self._clock() - began if self._steps else 0.0,
            endurance_bytes=self._endurance_bytes,
            budget_bytes=self._budget_bytes,
        )
