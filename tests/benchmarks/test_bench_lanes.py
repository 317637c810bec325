"""Several ranks on one drive: the figures, and that the processes run at the smallest size."""

from __future__ import annotations

from pathlib import Path

import bench_lanes
import pytest
import ranks


def test_the_time_of_each_rank_is_from_when_the_first_began() -> None:
    answers = [{"began": 10.0, "ended": 12.0}, {"began": 10.5, "ended": 13.0}]
    assert ranks.seconds_of(answers) == [2.0, 3.0]


def test_the_ratio_is_taken_within_a_round_whoever_was_slow() -> None:
    found = ranks.figures([[1.0, 1.2], [2.4, 2.0]], nbytes=10**9)
    assert (found["1_s"].p50, found["2_s"].p50) == pytest.approx((1.5, 1.8))
    ratio = found["slowest_to_fastest"]
    assert (ratio.p20, ratio.p80) == pytest.approx((1.2, 1.2))
    assert found["gb_per_s"].p50 == pytest.approx((2 / 1.2 + 2 / 2.4) / 2)
    assert found["slowest_rank"] == [1, 0]


def test_a_rank_that_ends_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(RuntimeError, match="status 1"):
        list(ranks.measure(missing, count=2, nbytes=1, rounds=1))


@pytest.mark.full
def test_it_runs_at_its_smallest_size(tmp_path: Path) -> None:
    rows = list(bench_lanes.run_ranks(small=True, directory=tmp_path))
    assert [(row.case, row.contender) for row in rows] == [
        ("2 ranks", "read"),
        ("2 ranks", "write"),
        ("4 ranks", "read"),
        ("4 ranks", "write"),
    ]
    for row in rows:
        count = int(row.case.split()[0])
        assert {f"{place}_s" for place in range(1, count + 1)} <= set(row.figures)
        assert row.figures["slowest_to_fastest"].p20 >= 1
    assert not list(tmp_path.iterdir())
