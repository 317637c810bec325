"""Where the time of a step goes, from the marks that a run has left."""

from __future__ import annotations

import pytest

from memascend.base.units import MIB
from memascend.cli.compare.steps import phase_times
from memascend.ledger.trace import BACKWARD, FORWARD, OPTIMIZER, OTHER, PHASES
from tests.support.comparisons import make_marks


def test_each_phase_has_its_time_and_what_it_waited_for() -> None:
    found = {time.phase: time for time in phase_times(make_marks(steps=3))}
    assert tuple(found) == PHASES
    assert {phase: time.total_s for phase, time in found.items()} == pytest.approx(
        {FORWARD: 2, BACKWARD: 4, OPTIMIZER: 3, OTHER: 1}
    )
    assert (found[FORWARD].drive_s, found[FORWARD].computing_s) == (1, 1)
    assert (found[OPTIMIZER].device_s, found[OPTIMIZER].computing_s) == (1, 2)
    assert (found[OTHER].optimizer_s, found[OTHER].computing_s) == (0.5, 0.5)
    assert found[BACKWARD].computing_s == 4
    assert {time.read_bytes for time in found.values()} == {16 * MIB}
    assert {time.written_bytes for time in found.values()} == {32 * MIB}


def test_a_single_step_is_taken_with_all_that_is_unlike_others() -> None:
    found = {time.phase: time for time in phase_times(make_marks(steps=1))}
    assert found[FORWARD].total_s == 3
    assert found[OPTIMIZER].total_s == 3
    assert found[OTHER].total_s == 0  # what comes after it belongs to no step


@pytest.mark.parametrize("count", [0, 2, 4])
def test_without_a_whole_step_there_is_nothing_to_tell(count: int) -> None:
    assert phase_times(make_marks(steps=1)[:count]) == []


def test_waiting_never_makes_computing_negative() -> None:
    """Waits are of all threads of training, such as autograd's beside the main one."""
    marks = make_marks(steps=2)
    last = [mark for mark in marks if mark.phase == FORWARD][-1]
    object.__setattr__(last.measures, "drive_wait_s", last.measures.drive_wait_s + 99)
    assert min(time.computing_s for time in phase_times(marks)) == 0
