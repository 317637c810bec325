"""A run that writes more than its budget: it warns or stops, and goes on from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import format_nbytes
from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("wear_program.py")
pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def found(run_program: RunProgram) -> dict[str, Any]:
    """What every run of the program left."""
    content: dict[str, Any] = run_program(str(PROGRAM))
    return content


def test_a_run_over_its_budget_stops_once_the_next_checkpoint_is_complete(
    found: dict[str, Any],
) -> None:
    stopped = found["stop"]
    assert stopped["losses"] == found["losses"][:4]
    assert stopped["saved"] == found["saved"][:1]
    assert stopped["saved"][0] < found["budget"] < found["saved"][1]
    for words in (
        "stopped by memascend.wear.write_budget",
        format_nbytes(found["saved"][1]),
        f"of the budget of {format_nbytes(found['budget'])}",
        "stop-4 is complete",
        "counts from 0",
    ):
        assert words in stopped["error"]


def test_it_warned_once_before_it_stopped(found: dict[str, Any]) -> None:
    [warning] = found["stop"]["warnings"]
    assert f"of the budget of {format_nbytes(found['budget'])}" in warning
    assert "stops after the next checkpoint" in warning
    assert "save one" in warning


def test_a_run_that_only_warns_trains_to_its_end(found: dict[str, Any]) -> None:
    warned = found["warn"]
    assert (warned["losses"], warned["error"]) == (found["losses"], "")
    [warning] = warned["warnings"]
    assert '"over_budget": "stop"' in warning


def test_a_resumed_run_counts_anew_and_has_the_losses_of_one_that_never_stopped(
    found: dict[str, Any],
) -> None:
    resumed = found["resumed"]
    assert resumed["losses"] == found["losses"][4:]
    assert resumed["saved"][0] < found["saved"][1]
    assert (resumed["error"], resumed["warnings"]) == ("", [])
