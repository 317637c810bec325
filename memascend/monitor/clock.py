"""The time of a step by phase: forward, backward, optimizer, and the rest.

Pure; the caller notes the begin of each phase, and gives the clock. Times are the host's, which
runs ahead of a device. Used by the training thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic

from memascend.ledger.trace import BACKWARD, FORWARD, OPTIMIZER, OTHER, PHASES

#: Number of steps that `StepClock.mean` averages.
STEPS_AVERAGED = 20


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of one step, or the mean over several."""

    forward: float = 0.0  # time in the model's forward passes
    backward: float = 0.0  # time from the end of a forward pass to the engine's step
    optimizer: float = 0.0  # time in the engine's step
    other: float = 0.0  # the rest since the last step: data, logs, evaluation, checkpoints
    #: Time that training and the activation thread waited for the drives. Excludes a background
    #: optimizer step.
    waited: float = 0.0

    @property
    def total(self) -> float:
        """Time from the end of the last step to the end of this one."""
        return self.forward + self.backward + self.optimizer + self.other


class StepClock:
    """Adds up the time that each phase takes in a step."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.phase = OTHER
        self._since = clock()
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._waited_before = 0.0
        self._has_begun = False
        self._recent: deque[StepTimes] = deque(maxlen=STEPS_AVERAGED)

    @property
    def phase_seconds(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._since

    @property
    def last(self) -> StepTimes | None:
        """The times of the last step; None before the first has ended."""
        return self._recent[-1] if self._recent else None

    @property
    def mean(self) -> StepTimes | None:
        """The mean times of the last steps; None before the first has ended."""
        count = len(self._recent)
        if not count:
            return None
        every = [asdict(times) for times in self._recent]
        return StepTimes(**{name: sum(one[name] for one in every) / count for name in every[0]})

    def begin_forward(self, *, after_backward: bool, waited: float) -> None:
        """Note that a forward pass begins, and the seconds that training waited so far.

        Without a backward pass since the last forward pass the time since then counts as other.
        """
        if not self._has_begun:  # exclude the time before the first step
            self._has_begun = True
            self._since, self._waited_before = self._clock(), waited
        self._enter(FORWARD, spent_as=None if after_backward else OTHER)

    def end_forward(self) -> None:
        """Note the end of a forward pass; backward follows, unless another forward pass begins."""
        self._enter(BACKWARD)

    def begin_step(self) -> None:
        """Note that the engine's step begins."""
        self._enter(OPTIMIZER)

    def end_step(self, *, is_boundary: bool, waited: float) -> None:
        """Note the end of the engine's step; at a boundary the optimizer stepped."""
        self._enter(OTHER)
        if not is_boundary:
            return
        self._recent.append(StepTimes(**self._spent, waited=waited - self._waited_before))
        self._waited_before = waited
        for phase in self._spent:
            self._spent[phase] = 0.0

    def _enter(self, phase: str, *, spent_as: str | None = None) -> None:
        """Begin a phase; the time since the last change counts as `spent_as`, or as the old one."""
        now = self._clock()
        self._spent[spent_as or self.phase] += now - self._since
        self.phase, self._since = phase, now
