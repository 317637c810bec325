"""The time of a step is shared out among its phases, whatever order they come in."""

from __future__ import annotations

import pytest

from memascend.monitor.clock import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    STEPS_AVERAGED,
    StepClock,
    StepTimes,
)


class Time:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def micro_step(clock: StepClock, time: Time, *, is_boundary: bool, waited: float = 0.0) -> None:
    """Forward takes 1 second, backward 2, the step 4, and what follows 8."""
    clock.begin_forward(after_backward=True, waited=waited)
    time.now += 1
    clock.end_forward()
    time.now += 2
    clock.begin_step()
    time.now += 4
    clock.end_step(is_boundary=is_boundary, waited=waited)
    time.now += 8


def test_before_the_first_step_there_are_no_times(time: Time) -> None:
    clock = StepClock(time)
    assert (clock.phase, clock.last, clock.mean) == (OTHER, None, None)


def test_a_step_has_the_times_of_all_its_micro_steps(time: Time) -> None:
    clock = StepClock(time)
    time.now += 1000  # building the model is no part of it
    micro_step(clock, time, is_boundary=False, waited=5.0)
    assert clock.last is None
    micro_step(clock, time, is_boundary=True, waited=6.5)
    assert clock.last == StepTimes(forward=2, backward=4, optimizer=8, other=8, waited=1.5)
    assert clock.last.total == 22
    micro_step(clock, time, is_boundary=True, waited=7.0)
    assert clock.last == StepTimes(forward=1, backward=2, optimizer=4, other=8, waited=0.5)
    assert clock.mean == StepTimes(forward=1.5, backward=3, optimizer=6, other=8, waited=1.0)


def test_the_phase_and_how_long_it_lasts_are_known_at_any_moment(time: Time) -> None:
    clock = StepClock(time)
    seen = []
    for begin in (
        lambda: clock.begin_forward(after_backward=False, waited=0.0),
        clock.end_forward,
        clock.begin_step,
        lambda: clock.end_step(is_boundary=True, waited=0.0),
    ):
        begin()
        time.now += 3
        seen.append((clock.phase, clock.phase_seconds))
    assert seen == [(FORWARD, 3), (BACKWARD, 3), (OPTIMIZER, 3), (OTHER, 3)]


def test_between_two_forward_passes_without_backward_is_no_backward(time: Time) -> None:
    clock = StepClock(time)
    for after_backward in (False, False, True):  # a failed one, a good one, the next of a window
        clock.begin_forward(after_backward=after_backward, waited=0.0)
        time.now += 1
        clock.end_forward()
        time.now += 10
    clock.begin_step()
    clock.end_step(is_boundary=True, waited=0.0)
    assert clock.last == StepTimes(forward=3, backward=20, other=10)


def test_a_mean_is_of_the_last_steps_alone(time: Time) -> None:
    clock = StepClock(time)
    for number in range(STEPS_AVERAGED + 5):
        clock.begin_forward(after_backward=True, waited=0.0)
        time.now += 100 if number < 5 else 1
        clock.end_forward()
        clock.begin_step()
        clock.end_step(is_boundary=True, waited=0.0)
    assert clock.mean is not None
    assert clock.mean.total == 1
