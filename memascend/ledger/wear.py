"""The bytes that a run writes to its drives, against their endurance and the user's budget.

Flash wears out by writing. A step of full fine-tuning writes 14 bytes and more for each
parameter, so a long run on a consumer drive is worth counting. Pure; the caller gives the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from memascend.base.units import format_nbytes

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Wear:
    """The account at one moment.

    Attributes:
        written_bytes: By all ranks of this machine, taken to be alike.
        step_bytes: Of that, one optimizer step's on average; the model's first writing is left out.
        steps: Optimizer steps so far.
        seconds: Since the first of them ended.
        endurance_bytes: What the drives may still be written; None when nobody stated it.
        budget_bytes: What this run may write; None without a budget.
    """

    written_bytes: int
    step_bytes: int
    steps: int
    seconds: float
    endurance_bytes: int | None = None
    budget_bytes: int | None = None

    @property
    def endurance_share(self) -> float | None:
        """Part of the stated endurance that this run has used."""
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
        """True when more was written than the user allows."""
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
        """Begin with nothing written.

        Args:
            endurance_bytes: What the drives may still be written.
            budget_bytes: What this run may write.
            ranks: That write to the same drives.
            clock: Gives seconds.
        """
        self._endurance_bytes, self._budget_bytes = endurance_bytes, budget_bytes
        self._ranks, self._clock = ranks, clock
        self._steps = 0
        # When the first step ended and what was written by then. The last writes of a step may
        # still be in flight, so the end of a step is only compared with the end of another.
        self._first_ended: tuple[float, int] = (0.0, 0)
        self._last_ended_bytes = 0
        self._is_reported = False

    def note_step(self, written_bytes: int) -> Wear | None:
        """Count an optimizer step.

        Args:
            written_bytes: By this rank, since it began.

        Returns:
            The account, once: when the budget is first exceeded.
        """
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
        """Return the account, when this rank has written so much."""
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
