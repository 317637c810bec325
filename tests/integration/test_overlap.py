"""A step goes on behind its caller, whatever its optimizer has for groups, and whoever looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("overlap_program.py")
LOOKS = Path(__file__).with_name("looks_program.py")


@pytest.mark.deepspeed
def test_norms_in_a_group_of_their_own_do_not_hold_the_first_layer_up(
    run_program: RunProgram,
) -> None:
    assert run_program(str(PROGRAM)) == [True] * 3


@pytest.mark.deepspeed
def test_who_looks_while_a_walk_is_held_sees_what_a_step_without_overlap_makes(
    run_program: RunProgram,
) -> None:
    behind, at_once = run_program(str(LOOKS)), run_program(str(LOOKS), "--no-overlap")
    assert [*behind] == [*at_once]
    waits = {"evaluate", "gather", "state_dict", "weight", "state", "destroy"}
    for look, (seen, loss, was_under_way, goes_on) in behind.items():
        assert [seen, loss] == at_once[look][:2], look
        assert was_under_way, look
        assert goes_on == (look not in waits), look
