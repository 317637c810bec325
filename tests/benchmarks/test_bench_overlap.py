"""The overlap bench: its arithmetic, its model, and that it runs at its smallest size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import bench_overlap
import pytest
import sleeping_model
import torch
import trainee
import transfers

from tests.device.emulator.build import why_not
from tests.support.benchmarks import rows_of

DRIVE_S = {
    "forward": 2.0,
    "backward": 4.0,
    "optimizer": 8.0,
    bench_overlap.EARLY_PHASE: 9.0,
}


def step_of(**seconds: float) -> dict[str, Any]:
    whole = sum(seconds.values())
    return {phase: {"wall_s": s} for phase, s in seconds.items()} | {"training": {"wall_s": whole}}


def test_a_bound_is_the_longer_one_of_compute_and_drive() -> None:
    model = trainee.Sleeping(10, 4, forward_s=0.1, backward_s=0.5)
    bounds = bench_overlap.bounds_of(model, DRIVE_S)
    assert bounds == {"forward": 2.0, "backward": 5.0, "optimizer": 8.0, "training": 14.0}


def test_the_whole_is_bound_by_all_compute_where_that_is_longer() -> None:
    model = trainee.Sleeping(10, 4, forward_s=1.0, backward_s=2.0)
    assert bench_overlap.bounds_of(model, DRIVE_S)["training"] == 30.0


def test_compute_is_a_multiple_of_the_drives_time_or_what_was_stated() -> None:
    idle = trainee.Sleeping(4, 8)
    found = bench_overlap.models(idle, DRIVE_S, None, (0.3, 3.0))
    assert list(found) == ["0.3x", "3x"]
    assert found["3x"].compute_s("forward") == pytest.approx(6.0)
    assert found["0.3x"].compute_s("backward") == pytest.approx(1.2)
    stated = bench_overlap.models(idle, DRIVE_S, (40.0, 80.0), (0.3, 3.0))
    assert [m.compute_s("backward") for m in stated.values()] == [pytest.approx(0.32)]


def test_the_least_time_is_that_of_what_has_to_come_one_after_the_other() -> None:
    model = trainee.Sleeping(10, 4, forward_s=0.1, backward_s=0.5)
    least = bench_overlap.least_of(model, DRIVE_S)
    # Three of four forward passes have an optimizer behind them, one optimizer is waited for.
    assert least[bench_overlap.OURS] == pytest.approx(5.0 + (3 * (2 + 8 + 0.1) + 2 + 8) / 4)
    # A quarter is left: its gradients go to the drive in backward, its step is behind forward.
    backward = 0.25 * 4 + 0.75 * 9
    stepped = (3 * (2 + 0.25 * 8 + 0.1) + 2 + 0.25 * 8) / 4
    assert least[bench_overlap.OURS_EARLY] == pytest.approx(backward + stepped)
    slow = trainee.Sleeping(10, 4, forward_s=2.0, backward_s=2.0)
    least = bench_overlap.least_of(slow, DRIVE_S)
    assert least[bench_overlap.OURS] == pytest.approx(20.0 + (3 * 20 + 20 + 8) / 4)
    assert least[bench_overlap.OURS_EARLY] == pytest.approx(20.0 + (3 * 20 + 20 + 2) / 4)


def test_ratios_to_the_bound_and_to_stock_are_of_one_round() -> None:
    # In the second round everything is twice as slow, the drive too.
    ours = [step_of(forward=f * 3.0, backward=f * 5.0, optimizer=f * 8.0) for f in (1, 2)]
    stock = [step_of(forward=f * 8.0, backward=f * 8.0, optimizer=f * 16.0) for f in (1, 2)]
    bound = {"forward": 2.0, "backward": 5.0, "optimizer": 8.0, "training": 14.0}
    bounds = [{phase: f * seconds for phase, seconds in bound.items()} for f in (1, 2)]
    found = bench_overlap.figures(ours, stock, bounds, least_s=[12.8, 25.6])
    for name, ratio in {
        "forward_to_bound": 1.5,
        "backward_to_bound": 1.0,
        "training_to_least": 1.25,
        "training_to_stock": 0.5,
    }.items():
        assert found[name].p20 == pytest.approx(ratio), name
        assert found[name].p80 == pytest.approx(ratio), name


def test_a_model_beside_has_the_same_bytes_and_compute() -> None:
    model = trainee.Sleeping(12, 4096, forward_s=0.04, backward_s=0.08)
    other = bench_overlap.beside(model, 3, 8192)
    assert (other.numel, other.forward_s, other.backward_s) == (model.numel, 0.16, 0.32)
    assert other.compute_s("backward") == pytest.approx(model.compute_s("backward"))
    with pytest.raises(ValueError, match="a quarter of the"):
        bench_overlap.beside(model, 4, 8192)


def test_a_layer_sleeps_both_ways_and_has_a_gradient() -> None:
    model = sleeping_model.SleepingModel(layers=2, width=8, forward_s=0.02, backward_s=0.04)
    begin = time.perf_counter()
    loss = model(torch.zeros(1, 3, dtype=torch.long), None).loss
    middle = time.perf_counter()
    loss.backward()
    assert middle - begin >= 0.04
    assert time.perf_counter() - middle >= 0.08
    assert all((layer.weight.grad != 0).all() for layer in model.layers)


@pytest.mark.parametrize("clipping", bench_overlap.CLIPPING["large"])
def test_only_without_clipping_steps_begin_during_backward(
    clipping: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainee.Trainee, "start", lambda self: None)
    monkeypatch.setattr(trainee.Trainee, "step", lambda self, count: self.config)
    model = trainee.Sleeping(1, 8)
    runs = bench_overlap.contenders_of(model, clipping, tmp_path)
    with transfers.Transfers(model.numel, tmp_path) as moved:
        taken, drives = bench_overlap.take_steps(runs, 1, moved)
    assert len(drives) == 1
    assert min(drives[0].values()) > 0
    assert {config["gradient_clipping"] for (config,) in taken.values()} == {clipping}
    early = {} if clipping else bench_overlap.EARLY
    assert [*taken] == [*bench_overlap.CONTENDERS, *early]


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize("emulated", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_it_runs_and_all_train_the_same(emulated: bool, tmp_path: Path) -> None:
    if emulated and (reason := why_not()):
        pytest.skip(reason)
    rows = rows_of("overlap", tmp_path, *["--emulated"] * emulated)
    trained = [row for row in rows if row["contender"] != bench_overlap.BOUND]
    assert len(trained) == len(bench_overlap.CONTENDERS) + len(bench_overlap.EARLY)
    layers, _ = bench_overlap.SIZES["small"]
    for row in trained:
        assert row["config"]["losses_equal"]
        assert row["config"]["accelerator"] == ("sim" if emulated else "cpu")
        seconds = {name: spread["p50"] for name, spread in row["figures"].items()}
        for phase in ("forward", "backward"):
            computed_s = layers * row["config"]["model"][f"{phase}_s"]
            assert seconds[f"{phase}_s"] >= computed_s
        parts = sum(seconds[f"{phase}_s"] for phase in bench_overlap.PHASES)
        assert parts <= seconds["training_s"] * (1 + 1e-9)
        assert row["figures"]["forward_to_bound"]["p50"] > 0


@pytest.mark.deepspeed
@pytest.mark.full
def test_it_runs_with_one_pass(tmp_path: Path) -> None:
    """All train the same, and one pass is there beside accumulation."""
    rows = rows_of("overlap", tmp_path, "--one-pass", "--clipping", "1", "--layer-ms", "1", "1")
    assert [row["contender"] for row in rows] == [*bench_overlap.ONE_PASSES]
    assert all(row["figures"]["training_loss_difference"] < 1e-6 for row in rows)
    _, accumulated, one_pass = (row["figures"]["training_bytes_per_parameter"] for row in rows)
    assert one_pass < 0.75 * accumulated
    assert rows[2]["figures"]["training_to_accumulation"]["p50"] > 0
