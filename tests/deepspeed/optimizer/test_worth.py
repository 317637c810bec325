"""Steps are measured in turns, and their times alone decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memascend.deepspeed.optimizer.worth import (
    ROW_COUNT,
    SAMPLE_COUNT,
    WARM_COUNT,
    Worth,
)

#: Steps until both kinds have enough times: two rows of each.
DECIDED_COUNT = WARM_COUNT + 4 * ROW_COUNT


class Run:
    """Steps of known times; a step's time has the walk of the step before."""

    def __init__(self, *, walks: tuple[float, float], backwards: tuple[float, float]) -> None:
        """Each pair is the time after backward, and with tiles in backward."""
        self.walks, self.backwards = walks, backwards
        self.now_s = 100.0
        self.worth = Worth(lambda: self.now_s)
        self.begun: list[bool] = []
        self.decisions: list[str] = []
        self._was_right = False

    def step(self, *, can_begin: bool = True, is_right: bool = True, more_s: float = 0.0) -> None:
        begins = self.worth.wants() and can_begin
        self.now_s += self.walks[self._was_right] + self.backwards[begins] + more_s
        self._was_right = begins and is_right
        self.decisions.append(self.worth.note(was_begun=begins, was_right=self._was_right))
        self.begun.append(begins)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def test_steps_that_save_time_begin_during_backward() -> None:
    run = Run(walks=(2.0, 0.5), backwards=(1.0, 1.5))
    run.steps(DECIDED_COUNT + 10)
    assert run.begun[:WARM_COUNT] == [False] * WARM_COUNT
    rows = [False] * ROW_COUNT + [True] * ROW_COUNT
    assert run.begun[WARM_COUNT:DECIDED_COUNT] == rows * 2
    assert all(run.begun[DECIDED_COUNT:])
    # 1 s of 3 is saved; a wrong one takes 3.5 s.
    assert run.worth.wrong_share_max == pytest.approx(1.0 / 1.5)


def test_the_decision_is_told_once_with_its_times() -> None:
    run = Run(walks=(2.0, 0.5), backwards=(1.0, 1.5))
    run.steps(DECIDED_COUNT + 10)
    told = [text for text in run.decisions if text]
    assert run.decisions[DECIDED_COUNT - 1] == told[0]
    assert len(told) == 1
    assert all(number in told[0] for number in ("during", "2.00 s", "3.00 s", "3.50 s"))


@pytest.mark.parametrize("early_s", [2.0, 1.0, 0.96])
def test_steps_that_save_nothing_stay_after_backward(early_s: float) -> None:
    run = Run(walks=(2.0, 2.0), backwards=(1.0, early_s))
    run.steps(DECIDED_COUNT + 10)
    assert run.worth.wrong_share_max == 0.0
    assert not any(run.begun[DECIDED_COUNT:])
    assert any("stay after" in text for text in run.decisions)


def test_a_wrong_guess_that_loses_nothing_may_always_be_made() -> None:
    run = Run(walks=(2.0, 0.5), backwards=(1.0, 1.0))
    run.steps(DECIDED_COUNT)
    assert run.worth.wrong_share_max == 1.0


def slow_start(run: Run) -> None:
    run.step(more_s=1000.0)
    run.steps(DECIDED_COUNT - 1)


def stops_now_and_then(run: Run) -> None:
    for number in range(DECIDED_COUNT):
        run.step(more_s=60.0 if number % 7 == 3 else 0.0)


@pytest.mark.parametrize("disturb", [slow_start, stops_now_and_then])
def test_a_few_slow_steps_decide_nothing(disturb: Callable[[Run], None]) -> None:
    run = Run(walks=(2.0, 0.5), backwards=(1.0, 1.5))
    disturb(run)
    assert run.worth.wrong_share_max == pytest.approx(1.0 / 1.5)


def test_wrong_guesses_are_no_times_of_right_ones() -> None:
    run = Run(walks=(2.0, 0.5), backwards=(1.0, 1.5))
    for number in range(3 * DECIDED_COUNT):
        run.step(is_right=number % 3 > 0)
    assert run.worth.wrong_share_max == pytest.approx(1.0 / 1.5)


def test_a_run_that_begins_no_step_decides_nothing() -> None:
    run = Run(walks=(2.0, 0.5), backwards=(1.0, 1.5))
    for _ in range(3 * DECIDED_COUNT):
        run.step(can_begin=False)
    assert run.worth.wrong_share_max is None
    assert SAMPLE_COUNT < DECIDED_COUNT
