"""The bench of states in bf16: its table, and that it trains at its smallest size."""

from __future__ import annotations

from pathlib import Path

import bench_states
import pytest

from tests.support.benchmarks import rows_of

FP32, BF16, OTHER = bench_states.RUNS


def test_losses_stand_beside_those_of_the_first_run_and_their_difference() -> None:
    losses = {FP32: [4.0, 3.0, 2.0, 1.0], BF16: [4.0, 3.5, 2.0, 0.5], OTHER: [5.0, 4.0, 3.0, 2.0]}
    table = bench_states.table(losses, 2)
    assert list(table) == ["step 2", "step 4", "mean of the last 2"]
    assert table["step 2"] == {
        "fp32, seed 42": "3.0000",
        "bf16, seed 42": "3.5000",
        "bf16, seed 42, above": "+0.5000",
        "fp32, seed 43": "4.0000",
        "fp32, seed 43, above": "+1.0000",
    }
    last = table["mean of the last 2"]
    assert (last[FP32.name], last[f"{BF16.name}, above"]) == ("1.5000", "-0.2500")


def test_runs_differ_in_the_dtype_or_the_seed_alone() -> None:
    assert (FP32.seed, FP32.state_dtype) == (BF16.seed, OTHER.state_dtype)
    assert FP32.seed != OTHER.seed
    wide, narrow = bench_states.configuration(FP32), bench_states.configuration(BF16)
    assert wide["memascend"]["streaming"]["optimizer"] == {"state_dtype": "fp32"}
    assert narrow["memascend"]["streaming"]["optimizer"] == {"state_dtype": "bf16"}
    assert wide | {"memascend": 0} == narrow | {"memascend": 0}


@pytest.mark.deepspeed
@pytest.mark.full
def test_it_trains_at_its_smallest_size(tmp_path: Path) -> None:
    rows = rows_of("states", tmp_path)
    assert [row["case"] for row in rows] == ["step 2", "step 4", "mean of the last 2"]
    losses = rows[0]["config"]["losses"]
    assert [len(losses[run.name]) for run in bench_states.RUNS] == [4, 4, 4]
    # The first step begins with moments of zero, whatever they are kept in.
    assert losses[FP32.name][0] == losses[BF16.name][0] != losses[OTHER.name][0]
