"""Where the time of a step goes: forward, backward, optimizer, and what lies between.

Pure; the caller says when each begins, and gives the clock. Times are those of the host, which on
a device runs ahead of it. For the thread that trains alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from memascend.ledger.trace import BACKWARD, FORWARD, OPTIMIZER, OTHER, PHASES

#: Steps that a mean is taken over.
STEPS_AVERAGED = 20


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of one step, or of one on average.

    Attributes:
        forward: In the model's forward passes.
        backward: From their ends until the engine steps.
        optimizer: In the engine's step.
        other: All else, from the end of the step before: data, logs, evaluation, checkpoints.
        waited: Of training and of the thread of activations, for the drives; not of the
            optimizer's, which goes on beside it.
    """

    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    waited: float = 0.0

    @property
    def total(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.forward + self.backward + self.optimizer + self.other


class StepClock:
    """Tells phases apart, and adds up what each took of a step."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Begin outside of every phase."""
        self._clock = clock
        self.phase = OTHER
        self._since = clock()
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._waited_before = 0.0
        self._has_begun = False
        self._recent: deque[StepTimes] = deque(maxlen=STEPS_AVERAGED)

    @property
    def phase_seconds(self) -> float:
        """Since the phase began."""
        return self._clock() - self._since

    @property
    def last(self) -> StepTimes | None:
        """The last step; None before the first has ended."""
        return self._recent[-1] if self._recent else None

    @property
    def mean(self) -> StepTimes | None:
        """The last steps on average; None before the first has ended."""
        count = len(self._recent)
        if not count:
            return None
        return StepTimes(
            forward=sum(times.forward for times in self._recent) / count,
            backward=sum(times.backward for times in self._recent) / count,
            optimizer=sum(times.optimizer for times in self._recent) / count,
            other=sum(times.other for times in self._recent) / count,
            waited=sum(times.waited for times in self._recent) / count,
        )

    def begin_forward(self, *, after_backward: bool, waited: float) -> None:
        """Note that a forward pass begins.

        Args:
            after_backward: Whether a backward pass came since the last one.
            waited: Seconds so far that training waited for the drives.
        """
        if not self._has_begun:  # what came before the first step is no part of it
            self._has_begun = True
            self._since, self._waited_before = self._clock(), waited
        self._enter(FORWARD, spent_as=None if after_backward else OTHER)

    def end_forward(self) -> None:
        """Note that it has ended; what follows is backward, unless another forward pass comes."""
        self._enter(BACKWARD)

    def begin_step(self) -> None:
        """Note that the engine's step begins."""
        self._enter(OPTIMIZER)

    def end_step(self, *, is_boundary: bool, waited: float) -> None:
        """Note that it has ended.

        Args:
            is_boundary: Whether it was the optimizer's, not that of one micro-batch among others.
            waited: Seconds so far that training waited for the drives.
        """
        self._enter(OTHER)
        if not is_boundary:
            return
        self._recent.append(StepTimes(**self._spent, waited=waited - self._waited_before))
        self._waited_before = waited
        for phase in self._spent:
            self._spent[phase] = 0.0

    def _enter(self, phase: str, *, spent_as: str | None = None) -> None:
        """Begin a phase; the one that ends may turn out to have been another."""
        now = self._clock()
        self._spent[spent_as or self.phase] += now - self._since
        self.phase, self._since = phase, now
