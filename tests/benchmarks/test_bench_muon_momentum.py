"""The bench of Muon's momentum: its forms, its table, and that it trains at its smallest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_muon_momentum
import pytest
import torch
from bench_muon_momentum import RUNS, in_codes, in_equal_distances

from tests.support.benchmarks import rows_of


def row(seed: int, name: str, loss: float) -> dict[str, Any]:
    return {
        "case": f"seed {seed}",
        "contender": name,
        "figures": {"loss": loss, "distance": 0.5 if name != RUNS[0].name else 0.0},
    }


def test_the_table_compares_each_run_with_the_first_of_its_seed() -> None:
    rows = [row(seed, run.name, seed + n) for seed in (1, 2) for n, run in enumerate(RUNS)]
    lines = bench_muon_momentum.table(rows).splitlines()
    assert lines[2] == "| bf16 | 1.0000, 2.0000 |  |  |  |"
    assert lines[5] == "| int8 | 4.0000, 5.0000 | +3.0000, +3.0000 | +3.0000 | 0.50, 0.50 |"


@pytest.mark.parametrize("stored", [in_codes, in_equal_distances])
def test_a_form_of_8_bits_is_near_and_changes_no_zero(stored: Any) -> None:
    momentum = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    momentum[0] = 0.0
    found = stored(momentum)
    assert (found.dtype, found.shape) == (momentum.dtype, momentum.shape)
    assert not found[0].any()
    errors = (found.float() - momentum.float()).abs().amax(1)
    assert errors.max() > 0
    assert bool((errors <= momentum.float().abs().amax(1) / 100).all())


@pytest.mark.full
@pytest.mark.deepspeed
def test_it_trains_every_run(tmp_path: Path) -> None:
    rows = rows_of("muon_momentum", tmp_path)
    assert [one["contender"] for one in rows] == [run.name for run in RUNS]
    losses = {one["contender"]: one["figures"]["loss"] for one in rows}
    assert losses["int8"] == pytest.approx(losses["bf16"], rel=0.01)
    assert losses["int8"] != losses["bf16"]
