"""The context bench: its arithmetic, and what it promises at its smallest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_context
import pytest
import sleeping_model
import torch

from tests.support.benchmarks import rows_of


def step_of(peak_bytes: int, wall_s: float) -> dict[str, Any]:
    return {
        "peak_bytes": peak_bytes,
        "baseline_bytes": 1000,
        "training": {"wall_s": wall_s},
        "components": {"all, held": 5_000_000},
        "saved_bytes_peak": None,
        "loss": "1.0",
    }


def test_layers_compute_in_proportion_to_what_they_save() -> None:
    idle = bench_context.wide(4, 8)
    whole = bench_context.computing(idle, 1.0, write_s=2.0, read_s=1.0)
    half = bench_context.computing(idle, 0.5, write_s=2.0, read_s=1.0)
    assert whole.forward_s == pytest.approx(bench_context.FORWARD_TO_WRITE * 0.5)
    assert (half.forward_s, half.backward_s) == (whole.forward_s / 2, whole.backward_s / 2)
    # An 8B layer keeps this drive busy for nearly as long as it computes, and half as long after.
    assert 0.5 < bench_context.FORWARD_TO_WRITE < 1.5 < bench_context.BACKWARD_TO_READ
    assert bench_context.checkpoint_bytes(idle, 16) == 4 * 8 * 2 * 16


def test_a_row_has_peaks_above_the_baseline_and_ratios_within_a_round() -> None:
    taken = {
        bench_context.HELD: [step_of(5_001_000, 2.0), step_of(9_001_000, 4.0)],
        bench_context.OURS: [step_of(3_001_000, 3.0), step_of(2_001_000, 6.0)],
    }
    rows = list(bench_context.rows_of(bench_context.wide(4, 8), 16, taken))
    ours = rows[1].figures
    assert (ours["peak_mb"], ours["of_held"]) == (3.0, pytest.approx(1 / 3))
    assert ours["time_to_held"].p50 == 1.5
    assert rows[0].figures["time_to_held"].p80 == 1.0


def test_a_wide_model_keeps_one_hidden_state_for_each_layer() -> None:
    model = sleeping_model.SleepingModel(
        layers=3, width=8, rows=2, hidden=16, forward_s=0.0, backward_s=0.0
    )
    model.gradient_checkpointing_enable()
    saved: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.zeros(1, 5, dtype=torch.long), None).loss
    assert saved.count(torch.Size([5, 16])) == 3
    loss.backward()
    assert [layer.weight.shape for layer in model.layers] == [torch.Size([2, 8])] * 3
    assert all((layer.weight.grad != 0).all() for layer in model.layers)


@pytest.mark.deepspeed
@pytest.mark.full
def test_our_own_bytes_are_the_same_for_every_number_of_tokens(tmp_path: Path) -> None:
    rows = rows_of("context", tmp_path)
    ours = [row for row in rows if row["contender"] == bench_context.OURS]
    steps = [row for row in ours if row["case"] != "slope"]
    assert len({row["figures"]["own_mb"] for row in steps}) == 1
    assert all(row["config"]["losses_equal"] for row in steps)
    slopes = {row["contender"]: row["figures"] for row in rows if row["case"] == "slope"}
    assert slopes[bench_context.HELD]["of_checkpoints"] > 0.9
    # Of 24 checkpoints three are on the device at most, beside what the layer at hand needs.
    assert slopes[bench_context.OURS]["of_checkpoints"] < 0.45
