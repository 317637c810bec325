"""The phases of one optimizer step, and what is kept from one step to the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from memascend.errors import TornStepError
from memascend.streaming.optimizer.step import _FOLLOWING, Step, StepPhase

NAMES = ["0_3", "4_4"]


def collecting() -> Step:
    return Step(NAMES)


def updating() -> Step:
    step = collecting()
    step.note_updates()
    return step


def skipped() -> Step:
    step = collecting()
    step.skip()
    return step


def decided() -> Step:
    step = collecting()
    step.decide(NAMES)
    return step


def walking() -> Step:
    step = decided()
    step.note_change()
    return step


def done() -> Step:
    step = walking()
    step.note_stepped()
    step.note_change()
    step.note_stepped()
    return step


def torn() -> Step:
    step = walking()
    step.note_failure()
    return step


STEPS: dict[StepPhase, Callable[[], Step]] = {
    StepPhase.COLLECTING: collecting,
    StepPhase.UPDATING: updating,
    StepPhase.SKIPPED: skipped,
    StepPhase.DECIDED: decided,
    StepPhase.WALKING: walking,
    StepPhase.DONE: done,
    StepPhase.TORN: torn,
}


def test_a_step_goes_from_phase_to_phase() -> None:
    assert set(STEPS) == set(StepPhase)
    for phase, make in STEPS.items():
        assert make().phase is phase


@pytest.mark.parametrize(("before", "after"), [*itertools.product(StepPhase, StepPhase)])
def test_only_transitions_of_the_table_are_possible(before: StepPhase, after: StepPhase) -> None:
    step = STEPS[before]()
    if after in _FOLLOWING[before]:
        step._enter(after)
        assert step.phase is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} cannot be {after.name}"):
            step._enter(after)


def test_integrity_is_lost_by_a_change_and_found_with_the_last_sub_group() -> None:
    step = decided()
    for is_torn in (True, False):
        step.note_change()
        assert step.is_mixed
        step.note_stepped()
        assert step.is_mixed == is_torn
    step = step.following()
    step.note_change()
    with pytest.raises(TornStepError):
        step.decide(NAMES)
    step.mend()
    step.check()


@pytest.mark.parametrize("phase", [StepPhase.WALKING, StepPhase.TORN])
def test_a_walk_that_is_over_half_way_is_torn_also_where_no_line_said_so(phase: StepPhase) -> None:
    """Ctrl-C may end a walk at any line."""
    step = STEPS[phase]()
    with pytest.raises(TornStepError, match="load a checkpoint"):
        step.check()
    assert step.following() is step


@pytest.mark.parametrize("phase", [StepPhase.COLLECTING, StepPhase.DECIDED])
def test_an_error_before_the_first_change_tears_nothing(phase: StepPhase) -> None:
    step = STEPS[phase]()
    step.note_failure()
    step.check()
    assert step.following().phase is StepPhase.COLLECTING


@pytest.mark.parametrize("phase", StepPhase)
def test_a_load_may_begin_in_any_phase_and_the_gradients_are_kept(phase: StepPhase) -> None:
    step = STEPS[phase]()
    step.basis, step.doubt = [{"lr": 1.0}], "a checkpoint was loaded"
    step.note_load()
    with pytest.raises(TornStepError):
        step.check()
    step.mend()
    assert (step.phase, step.doubt) == (StepPhase.COLLECTING, "a checkpoint was loaded")
    step.decide(NAMES)


@pytest.mark.parametrize("phase", StepPhase)
def test_a_following_step_has_no_gradients_and_the_order_of_the_last_one(phase: StepPhase) -> None:
    step = STEPS[phase]()
    step.basis, step.doubt = [{"lr": 1.0}], "a value was set"
    step.arrived.add(("0_3", 0))
    following = step.following()
    assert (following.basis, following.doubt, following.arrived) == ((), "", set())
    assert following.order == NAMES


def test_updates_of_matrices_are_torn_until_the_walk_is_over_or_the_step_is_skipped() -> None:
    """Momentum has moved on, and an update stands where a gradient was."""
    step = updating()
    assert step.is_mixed
    with pytest.raises(TornStepError):
        step.note_updates()
    step.decide(NAMES)
    assert step.phase is StepPhase.WALKING
    for _ in NAMES:
        step.note_stepped()
    assert not step.is_mixed
    step = updating()
    step.note_failure()
    assert step.phase is StepPhase.TORN
    step = updating()
    step.skip()
    assert step.following().phase is StepPhase.COLLECTING


def test_a_step_whose_call_did_not_return_is_the_next_one_until_a_backward_pass() -> None:
    step = Step()
    step.call()
    step.decide(["a"])
    step.note_change()
    step.note_stepped()
    assert step.was_cut
    assert step.following() is step
    step.note_pass()
    assert not step.was_cut
    assert step.following() is not step


def test_a_skipped_step_whose_call_did_not_return_is_not_made_when_it_is_called_again() -> None:
    step = Step()
    step.call()
    step.skip()
    assert step.was_cut
    assert step.following() is step
    step.note_pass()
    assert step.following() is not step


def test_a_step_whose_call_returned_is_over() -> None:
    step = Step()
    step.call()
    step.decide(["a"])
    step.note_change()
    step.note_stepped()
    assert step.end_call() is not step
    assert not step.was_cut


def test_a_torn_step_is_not_called() -> None:
    step = Step()
    step.note_load()
    with pytest.raises(TornStepError):
        step.call()
    assert not step.was_cut
