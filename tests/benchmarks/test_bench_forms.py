"""The bench of a step's forms: its arithmetic, and that it runs at its smallest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_forms
import pytest
from bench_step import STOCK

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


@pytest.mark.deepspeed
@pytest.mark.full
def test_the_drive_moves_what_the_plan_says_and_guesses_are_as_stated(tmp_path: Path) -> None:
    rows = rows_of("forms", tmp_path)
    assert [row["contender"] for row in rows] == [*bench_forms.FORMS]
    for row in rows:
        found = row["figures"]
        if row["contender"] not in (STOCK, "halves, wrong guesses"):
            written = found["written_per_parameter"]["p50"]
            assert written == pytest.approx(found["planned_written"], rel=0.05)
            read = found["read_per_parameter"]["p50"]
            assert 0.95 * found["planned_read_least"] <= read <= 1.05 * found["planned_read"]
    by_name = {row["contender"]: row["figures"] for row in rows}
    right, wrong = by_name["halves, right guesses"], by_name["halves, wrong guesses"]
    assert wrong["written_per_parameter"]["p50"] > right["written_per_parameter"]["p50"] + 3
