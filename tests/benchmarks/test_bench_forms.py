"""The bench of a step's forms: its arithmetic, and that it runs at its smallest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_forms
import harness
import pytest

from tests.support.benchmarks import rows_of


def step_of(wall_s: float, read: int, written: int) -> dict[str, Any]:
    return {"training": {"wall_s": wall_s, "read_bytes": read, "written_bytes": written}}


def test_ratios_are_to_whole_master_weights_within_a_round() -> None:
    ours = [step_of(1.0, 300, 200), step_of(4.0, 300, 220)]
    whole = [step_of(2.0, 400, 400), step_of(4.0, 400, 400)]
    found = bench_forms.figures(ours, whole, 20)
    assert found["to_whole"].p50 == pytest.approx(0.75)
    assert found["read_per_parameter"].p50 == 15.0
    assert found["written_per_parameter"].p50 == pytest.approx(10.5)


def test_bytes_are_compared_with_those_of_the_plan() -> None:
    """The plan has a range of reads: memory gives some of them if forward waits for the step."""
    range_of = {"planned_read": 18.0, "planned_read_least": 16.0, "planned_written": 14.0}
    for read, written, off in ((17.0, 14.0, 0.0), (18.9, 14.0, 0.05), (12.0, 15.4, 0.25)):
        spreads = {
            f"{verb}_per_parameter": harness.spread([value])
            for verb, value in (("read", read), ("written", written))
        }
        assert bench_forms.off_plan(range_of | spreads) == pytest.approx(off)


@pytest.mark.deepspeed
@pytest.mark.full
def test_the_drive_moves_what_the_plan_says_and_guesses_are_as_stated(tmp_path: Path) -> None:
    rows = rows_of("forms", tmp_path)
    assert [row["contender"] for row in rows] == [*bench_forms.FORMS]
    for row in rows:
        # When the norm of so small a model is known not all tiles of a wrong guess have begun.
        if row["contender"] != bench_forms.WRONG:
            assert row["figures"]["off_plan"] <= 0.05, row
    by_name = {row["contender"]: row["figures"] for row in rows}
    right, wrong = by_name["halves, right guesses"], by_name["halves, wrong guesses"]
    assert wrong["written_per_parameter"]["p50"] > right["written_per_parameter"]["p50"] + 3
