"""A step goes on behind a forward pass, whatever parameter groups its optimizer has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("overlap_program.py")


@pytest.mark.deepspeed
def test_norms_in_a_group_of_their_own_do_not_hold_the_first_layer_up(
    run_program: RunProgram,
) -> None:
    assert run_program(str(PROGRAM)) == [True] * 3
