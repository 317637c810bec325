"""What the plan says that a step moves is what it moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("traffic_program.py")
TIMEOUT_S = 1500.0  # a busy machine takes five times as long as one with nothing else to do
TRAININGS = [
    (),
    ("--recomputes",),
    ("--recomputes", "--reuse-distance", "25000000"),
    ("--recomputes", "--accumulation", "4"),
    ("--no-limit",),
    ("--no-limit", "--recomputes", "--accumulation", "8", "--sum-dtype", "fp32"),
    ("--recomputes", "--accumulation", "8", "--sum-dtype", "fp32"),
    ("--recomputes", "--state-dtype", "bf16"),
    ("--recomputes", "--during-backward", "--limit", "165MiB"),
    ("--recomputes", "--during-backward", "--accumulation", "4", "--sum-dtype", "fp32"),
]

pytestmark = [pytest.mark.deepspeed, pytest.mark.full, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def moved(run_program: RunProgram) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return what one process has found in all trainings, one behind the other."""
    found = run_program(str(PROGRAM), json.dumps(TRAININGS), timeout_s=TIMEOUT_S)
    return dict(zip(TRAININGS, found, strict=True))


@pytest.mark.parametrize("options", TRAININGS, ids=" ".join)
def test_a_step_moves_what_is_planned(
    moved: dict[tuple[str, ...], dict[str, Any]], options: tuple[str, ...]
) -> None:
    for direction in ("read", "written"):
        planned = sum(moved[options][direction]["planned"].values())
        assert moved[options][direction]["measured"] == pytest.approx(planned, rel=0.05)
