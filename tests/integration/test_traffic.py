"""What the plan says that a step moves is what it moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("traffic_program.py")


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--recomputes",),
        ("--recomputes", "--reuse-distance", "25000000"),
        ("--recomputes", "--accumulation", "4"),
        ("--no-limit",),
        ("--no-limit", "--recomputes", "--accumulation", "8", "--sum-dtype", "fp32"),
        ("--recomputes", "--accumulation", "8", "--sum-dtype", "fp32"),
        ("--recomputes", "--state-dtype", "bf16"),
        ("--recomputes", "--during-backward"),
        ("--recomputes", "--during-backward", "--accumulation", "4", "--sum-dtype", "fp32"),
    ],
    ids=" ".join,
)
def test_a_step_moves_what_is_planned(run_program: RunProgram, options: tuple[str, ...]) -> None:
    found = run_program(str(PROGRAM), *options)
    for direction in ("read", "written"):
        planned = sum(found[direction]["planned"].values())
        assert found[direction]["measured"] == pytest.approx(planned, rel=0.05)
