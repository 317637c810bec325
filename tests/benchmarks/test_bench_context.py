"""The context bench: its arithmetic, and what it promises at its smallest size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_context
import pytest
import sleeping_model
import torch

from tests.device.emulator.build import why_not
from tests.support.benchmarks import rows_of

TOKEN_BYTES = 4 * 8 * 2  # of four layers, each 8 wide


def step_of(host_bytes: int, wall_s: float, device_bytes: int | None = None) -> dict[str, Any]:
    peaks = {"active_bytes": device_bytes, "allocated_bytes": 1_000_000}
    return {
        "above_imports_bytes": host_bytes,
        "on_device": None if device_bytes is None else peaks,
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


def test_a_row_has_peaks_and_our_time_within_a_round() -> None:
    taken = {
        bench_context.HELD: [step_of(5_000_000, 2.0), step_of(9_000_000, 4.0)],
        bench_context.OURS: [step_of(3_000_000, 3.0), step_of(2_000_000, 6.0)],
    }
    held, ours = bench_context.rows_of(bench_context.wide(4, 8), 16, taken)
    assert (held.figures["host_mb"], ours.figures["host_mb"]) == (9.0, 3.0)
    assert held.figures["ours_to_it"].p50 == 1.5
    assert ours.figures["ours_to_it"].p80 == 1.0
    assert held.figures["saved_mb"] == 16 * TOKEN_BYTES / 1e6
    assert "device_mb" not in held.figures


def test_slopes_are_of_the_host_and_of_the_device_apart() -> None:
    rows = []
    for tokens in (1_000_000, 3_000_000):
        kept, moved = TOKEN_BYTES * tokens, TOKEN_BYTES // 4 * tokens
        taken = {
            bench_context.HELD: [step_of(7_000_000, 1.0, kept)],
            bench_context.OFFLOAD: [step_of(7_000_000 + kept, 1.0, moved)],
            bench_context.OURS: [step_of(9_000_000 + kept // 64, 1.0, moved)],
        }
        rows += bench_context.rows_of(bench_context.wide(4, 8), tokens, taken)
    held, offload, ours = (row.figures for row in bench_context.slopes_of(rows, TOKEN_BYTES))
    assert held["host_bytes_per_token"] == pytest.approx(0)
    assert held["device_bytes_per_token"] == pytest.approx(TOKEN_BYTES)
    assert offload["host_of_checkpoints"] == pytest.approx(1)
    assert offload["ours_to_it"] == pytest.approx(1 / 64)
    assert ours["device_bytes_per_token"] == pytest.approx(TOKEN_BYTES / 4)
    # Of what did not grow there is nothing to be a part of.
    assert "ours_to_it" not in held | ours


def test_a_wide_model_keeps_one_hidden_state_for_each_layer() -> None:
    model = sleeping_model.SleepingModel(
        layers=3, width=8, rows=2, hidden=16, forward_s=0.0, backward_s=0.0
    )
    model.activation_checkpointing_enable()
    saved: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.zeros(1, 5, dtype=torch.long), None).loss
    assert saved.count(torch.Size([1, 5, 16])) == 3
    loss.backward()
    assert [layer.weight.shape for layer in model.layers] == [torch.Size([2, 8])] * 3
    assert all((layer.weight.grad != 0).all() for layer in model.layers)


def test_a_layer_whose_input_was_lost_has_another_gradient() -> None:
    gradients = []
    for kept in (1, 0):
        model = sleeping_model.SleepingModel(
            layers=1, width=8, rows=2, hidden=16, forward_s=0.0, backward_s=0.0
        )
        hooks = (lambda tensor: tensor, lambda tensor, kept=kept: kept * tensor)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            loss = model(torch.zeros(1, 5, dtype=torch.long), None).loss
        loss.backward()
        gradients.append(model.layers[0].weight.grad)
    assert not torch.equal(*gradients)


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize("accelerator", ["sim", pytest.param("cpu", marks=pytest.mark.matrix)])
def test_our_own_bytes_are_the_same_for_every_number_of_tokens(
    accelerator: str, tmp_path: Path
) -> None:
    is_emulated = accelerator == "sim"
    if is_emulated and (reason := why_not()):
        pytest.skip(reason)
    rows = rows_of("context", tmp_path, *["--emulated"] * is_emulated)
    steps = [row for row in rows if row["case"] != "slope"]
    slopes = {row["contender"]: row["figures"] for row in rows if row["case"] == "slope"}
    assert tuple(slopes) == tuple(bench_context.TRAINING[accelerator])
    assert all(row["config"]["losses_equal"] for row in steps)
    ours = [row["figures"] for row in steps if row["contender"] == bench_context.OURS]
    assert len({figures["own_mb"] for figures in ours}) == 1
    if is_emulated:
        check_slopes(slopes)
        return
    assert slopes[bench_context.HELD]["host_of_checkpoints"] > 0.9
    # Of 24 checkpoints three are on the device at most, beside what the layer at hand needs.
    assert slopes[bench_context.OURS]["host_of_checkpoints"] < 0.45


def check_slopes(slopes: dict[str, dict[str, Any]]) -> None:
    """Checkpoints grow where they are kept, and nothing grows in host memory but them."""
    in_host = (bench_context.OFFLOAD, bench_context.CPU_CHECKPOINTING)
    for name, figures in slopes.items():
        assert (figures["host_of_checkpoints"] > 0.9) is (name in in_host), name
    held = slopes[bench_context.HELD]
    assert abs(held["host_of_checkpoints"]) < 0.1
    for name in in_host:
        assert slopes[name]["ours_to_it"] <= 0.1, name
    layers, width = bench_context.SIZES["sim"]["small"]
    assert held["tensors_bytes_per_token"] >= layers * width * bench_context.ITEMSIZE
    assert slopes[bench_context.OURS]["tensors_bytes_per_token"] < (
        held["tensors_bytes_per_token"] / 2
    )
