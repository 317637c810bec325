"""The bench of formats: its tables, and that it trains at its smallest size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bench_formats
import pytest
import torch
from bench_formats import RUNS
from state_formats import FORMATS

from tests.support.benchmarks import rows_of


def trained(seed: int, base: float) -> list[dict[str, Any]]:
    """Rows of a seed; each run's loss is 0.01 above the one before it."""
    return [
        {
            "case": f"seed {seed}",
            "contender": run.name,
            "figures": {"losses": [9, 8, 7, base + 0.01 * number], "distance": 0.1 * number},
            "config": {"steps": 8},
        }
        for number, run in enumerate(RUNS)
    ]


def test_the_tables_have_each_seed_whose_runs_are_all_there() -> None:
    rows = [*trained(0, 2.0), *trained(3, 3.0), *trained(4, 4.0)[:-1]]
    training, parts = bench_formats.tables(rows).split("\n\n")
    lines = training.splitlines()
    assert lines[2] == "| fp32 | 2.0000, 3.0000 |  |  |  |"
    name = RUNS[4].name
    assert lines[6] == f"| {name} | 2.0400, 3.0400 | +0.0400, +0.0400 | +0.0400 | 0.40, 0.40 |"
    assert parts.splitlines()[0].endswith("| step 2 | step 4 | step 6 | step 8 |")
    assert parts.splitlines()[5] == f"| {name} | +0.0000 | +0.0000 | +0.0000 | +0.0400 |"


def test_runs_differ_from_the_first_in_one_way_each_but_one() -> None:
    first, *others = RUNS
    fields = ("moments", "master_dtype", "moved", "batches")
    counts = {
        run.name: sum(getattr(run, field) != getattr(first, field) for field in fields)
        for run in others
    }
    assert counts.pop("int8, bf16+8 master") == 2
    assert set(counts.values()) == {1}


def test_a_moment_that_becomes_zero_shows_in_the_update() -> None:
    exp_avg, exp_avg_sq = torch.full((256,), 1e-3), torch.full((256,), 1e-12)
    exp_avg_sq[::128] = 1.0
    found = bench_formats.one_rounding(exp_avg, exp_avg_sq, 1000)
    assert found["fp32"]["error"] < 1e-6
    assert found["int8"]["lost_share"] == 0
    lost = found["FlashOptim's, blocks of 128"]
    assert lost["lost_share"] == pytest.approx(254 / 256)
    assert lost["largest"] > 50


def test_blocks_that_follow_have_no_zero() -> None:
    moments = torch.arange(1.0, 5 * 256 + 1)
    moments[300] = 0
    found = bench_formats.chosen_blocks(moments, 2)
    assert found.tolist() == [*range(1, 257), *range(4 * 256 + 1, 5 * 256 + 1)]


def test_second_moments_follow_by_rounding_at_random_alone() -> None:
    """500 steps of gradients at a tenth: exact roots fall to 0.78 of what they were."""
    found = bench_formats.following(torch.full((1024,), 1e-8), 500)
    for name in ("fp32", "bf16", "int8", "int8/bf16"):
        assert found[name]["fallen_median"] == pytest.approx(1, abs=0.02), name
        assert found[name]["steady_median"] == pytest.approx(1, abs=0.02), name
    assert found["int8, rounded to nearest"]["fallen_median"] > 1.2


def test_it_trains_at_its_smallest_size(tmp_path: Path) -> None:
    rows = rows_of("formats", tmp_path)
    by_case: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["contender"]] = row["figures"]
    rounded = [f"rounded at step {step}" for step in bench_formats.SIZES["small"].rounded_at]
    assert set(by_case) == {"seed 0", "second moments follow", *rounded}
    assert list(by_case["seed 0"]) == [run.name for run in RUNS]
    assert all(list(by_case[case]) == [*FORMATS] for case in by_case if case != "seed 0")
    losses = [figures["losses"] for figures in by_case["seed 0"].values()]
    # Every run learns, and the formats change some bits of it.
    assert all(each[-1] < each[0] < math.log(256) for each in losses)
    assert len({tuple(each) for each in losses}) == len(RUNS)
    assert by_case["seed 0"]["fp32"]["distance"] == 0
    assert by_case["seed 0"]["fp32, other batches"]["distance"] > 0.5
