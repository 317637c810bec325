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
#: Layers of three matrices compute a batch in so many slices; slots have room for two matrices.
SLICES = (1, 4, 8, 16)


def sliced(count: int) -> tuple[str, ...]:
    layers = ("--recomputes", "--matrices", "3", "--sequences", "16")
    return (*layers, "--slices", str(count))


UNHURRIED = (*sliced(8), "--prefetch", "0")
TRAININGS += [*(sliced(count) for count in SLICES), UNHURRIED]

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


def test_a_step_in_slices_moves_and_gathers_what_a_whole_one_does(
    moved: dict[tuple[str, ...], dict[str, Any]],
) -> None:
    for count in SLICES:
        found = moved[sliced(count)]
        for direction in ("read", "written"):
            of_whole = moved[sliced(1)][direction]["measured"]
            assert found[direction]["measured"] == pytest.approx(of_whole, rel=0.01), count
        for phase in ("forward", "backward"):
            assert set(found["gathers"][phase]) == {1.0}, (count, phase)


def test_one_layer_is_gathered_at_once_where_nothing_is_prefetched(
    moved: dict[tuple[str, ...], dict[str, Any]],
) -> None:
    assert moved[UNHURRIED]["at_once"] == 3
