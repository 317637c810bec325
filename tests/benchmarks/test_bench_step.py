"""The step bench: its arithmetic, its turns, and that it runs at its smallest size."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import bench_step
import pytest
import trainee
import transfers

from memascend.config.block import parse_block
from tests.support.benchmarks import rows_of


def step_of(wall_s: float, moved_bytes: int) -> dict[str, Any]:
    part = {
        "wall_s": wall_s,
        "cpu_s": wall_s / 4,
        "read_bytes": moved_bytes // 2,
        "written_bytes": moved_bytes // 2,
    }
    return {"training": part, "optimizer": part}


def test_ratios_to_stock_are_taken_within_a_round() -> None:
    model = trainee.Model(1)
    # The drive is ten times slower in the second round; the ratio is 0.5 in both.
    stock = [step_of(2.0, 40 * model.numel), step_of(20.0, 40 * model.numel)]
    ours = [step_of(1.0, 30 * model.numel), step_of(10.0, 30 * model.numel)]
    found = bench_step.figures(ours, stock, model)
    for part in ("training", "optimizer"):
        assert found[f"{part}_bytes_per_parameter"] == pytest.approx(30)
        assert found[f"{part}_bytes_ratio"] == pytest.approx(0.75)
        assert found[f"{part}_wall_ratio"].p20 == found[f"{part}_wall_ratio"].p80 == 0.5
        assert found[f"{part}_cpu_ratio"].p50 == 0.5


def test_every_run_starts_a_round_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def step(self: trainee.Trainee) -> dict[str, Any]:
        order.append(self.name)
        return step_of(1.0, 2) | {"peak_bytes": 30}

    def start(self: trainee.Trainee) -> None:
        self.events["baseline"] = {"rss_bytes": 20}

    monkeypatch.setattr(trainee.Trainee, "start", start)
    monkeypatch.setattr(trainee.Trainee, "step", step)
    taken = bench_step.take_steps(trainee.Model(1), tmp_path, rounds=1)
    names = list(bench_step.CONTENDERS)
    assert order[:3] == names
    assert order[3:6] == [*names[1:], names[0]]
    expected = dict.fromkeys([*names, bench_step.DRIVE], 1)
    assert {name: len(steps) for name, steps in taken.items()} == expected
    assert taken[names[0]][0]["above_imports_bytes"] == 10


def test_micro_steps_are_those_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[dict[str, Any]] = []

    def start(self: trainee.Trainee) -> None:
        configs.append(self.config)
        raise RuntimeError("enough")

    monkeypatch.setattr(trainee.Trainee, "start", start)
    options = ["--small", "--accumulation", "8", "--sum-dtype", "fp32"]
    with pytest.raises(RuntimeError, match="enough"):
        bench_step.run_and_report(
            bench_step.arguments().parse_args([*options, "--directory", str(tmp_path)])
        )
    assert configs[0]["gradient_accumulation_steps"] == 8
    assert configs[0]["data_types"] == {"grad_accum_dtype": "fp32"}


def test_square_matrices_take_the_place_of_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[dict[str, Any]] = []

    def start(self: trainee.Trainee) -> None:
        shapes.append(self.model.shape)
        raise RuntimeError("enough")

    monkeypatch.setattr(trainee.Trainee, "start", start)
    options = ["--size", "3", "64", "--directory", str(tmp_path)]
    with pytest.raises(RuntimeError, match="enough"):
        bench_step.run_and_report(bench_step.arguments().parse_args(options))
    assert shapes[0] == trainee.Sleeping(3, 64).shape
    assert shapes[0]["forward_s"] == shapes[0]["backward_s"] == 0


def test_one_pass_has_as_many_slices_as_others_have_micro_steps(tmp_path: Path) -> None:
    runs = {
        name: bench_step.trainee_of(
            name,
            contender,
            trainee.Model(1),
            tmp_path,
            micro_steps={"gradient_accumulation_steps": 8},
            checkpoints=True,
        )
        for name, contender in bench_step.ONE_PASSES.items()
    }
    assert {tuple(run.options[:2]) for run in runs.values()} == {("--checkpointing", "deepspeed")}
    one_pass = runs.pop(bench_step.ONE_PASS)
    assert all(run.config["gradient_accumulation_steps"] == 8 for run in runs.values())
    assert one_pass.config["gradient_accumulation_steps"] == 1
    assert one_pass.config["train_micro_batch_size_per_gpu"] == 8
    assert list(one_pass.options[2:]) == ["--sequences", "8"]
    assert parse_block(one_pass.block or {}).micro_batches.slices_of(8) == 8


def test_muon_is_beside_cpu_offload_in_runs_that_differ_in_the_offload_alone(
    tmp_path: Path,
) -> None:
    runs = {
        name: bench_step.trainee_of(
            name, contender, trainee.Model(1), tmp_path, micro_steps=bench_step.MUON
        )
        for name, contender in bench_step.MUONS.items()
    }
    zeros = {name: run.config["zero_optimization"] for name, run in runs.items()}
    devices = {name: zero["offload_optimizer"]["device"] for name, zero in zeros.items()}
    assert next(iter(devices.items())) == (bench_step.CPU_OFFLOAD, "cpu")
    assert devices[bench_step.STOCK] == devices[bench_step.OURS] == "nvme"
    assert {zero["reduce_scatter"] for zero in zeros.values()} == {False}
    for run in runs.values():
        assert run.config["optimizer"]["type"] == "Muon"
        assert run.config["gradient_clipping"] == 0
        assert run.environment == {"TORCHDYNAMO_DISABLE": "1"}


def test_the_transfers_of_adam_are_not_timed_beside_muon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: trainee.Trainee) -> None:
        self.events["baseline"] = {"rss_bytes": 20}

    monkeypatch.setattr(trainee.Trainee, "start", start)
    monkeypatch.setattr(trainee.Trainee, "step", lambda self: step_of(1.0, 2) | {"peak_bytes": 30})
    monkeypatch.setattr(bench_step, "Transfers", None)
    taken = bench_step.take_steps(
        trainee.Model(1), tmp_path, 2, bench_step.MUONS, micro_steps=bench_step.MUON
    )
    assert {name: len(steps) for name, steps in taken.items()} == dict.fromkeys(bench_step.MUONS, 2)


def test_losses_of_steps_are_compared_by_their_means() -> None:
    stock = [{"loss": "2.0,4.0"}, {"loss": "1.0,1.0"}]
    assert bench_step.loss_difference([{"loss": "3.0"}, {"loss": "1.5"}], stock) == 0.5


def test_a_model_that_is_not_tied_has_its_head_besides() -> None:
    tied, free = trainee.Model(2), bench_step.untied(trainee.Model(2).numel)
    assert free.numel - tied.numel == trainee.VOCABULARY * trainee.HIDDEN
    assert (tied.shape["tie_word_embeddings"], free.shape["tie_word_embeddings"]) == (True, False)


def test_a_limit_follows_the_model() -> None:
    *others, limited = bench_step.ACCUMULATING.values()
    for model in (trainee.Model(1), trainee.Model(2)):
        config = parse_block(limited.block_for(model) or {})
        assert config.host_memory_limit == bench_step.LIMIT_BYTES * model.numel
        assert all(other.block_for(model) == other.block for other in others)


@pytest.mark.parametrize("key", bench_step.VARIATIONS)
def test_a_variation_is_of_valid_blocks_that_differ(key: str) -> None:
    blocks = [contender.block or {} for contender in bench_step.VARIATIONS[key].values()]
    configs = [parse_block(block) for block in blocks]
    assert all(left != right for left, right in itertools.pairwise(configs))


def test_the_heap_is_compared_with_one_that_is_left_alone() -> None:
    first, *others = bench_step.VARIATIONS["heap"].values()
    assert first.block == {"heap": {"enabled": False}}
    assert all(parse_block(other.block or {}).heap.enabled for other in others)


def test_the_peak_and_the_faults_of_a_run_are_figures() -> None:
    model = trainee.Model(1)
    part = {"wall_s": 1.0, "cpu_s": 1.0, "minor_faults": 7, "read_bytes": 2, "written_bytes": 2}
    steps = [{"training": part, "above_imports_bytes": nbytes} for nbytes in (3e6, 5e6)]
    found = bench_step.figures(steps, steps, model)
    assert found["memory_peak_mb"] == 5
    assert found["memory_faults"].p50 == 7


def test_the_drive_alone_moves_what_a_step_moves(tmp_path: Path) -> None:
    numel = 2 * transfers.TILE_NUMEL + 3  # two whole tiles and a bit
    with transfers.Transfers(numel, tmp_path) as moved:
        before = moved.stats()
        moved.run()
        after = moved.stats()
    # Both halves of weights and two states; gradients are read besides. Each key's last block is
    # whole.
    for direction, keys, element_bytes in (("bytes_read", 5, 14), ("bytes_written", 4, 12)):
        moved_bytes = after[direction] - before[direction]
        assert 0 <= moved_bytes - element_bytes * numel < keys * 4096
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_says_what_it_printed_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('no such drive')\nraise SystemExit(3)\n")
    folder = tmp_path / "drive"
    folder.mkdir()
    monkeypatch.setattr(trainee, "PROGRAM", program)
    model = trainee.Model(1)
    config = bench_step.training_config(model, {}, folder)
    run = trainee.Trainee("stock", config, model, folder)
    with pytest.raises(RuntimeError, match=r"status 3(.|\n)*no such drive"), run:
        pass
    assert list(folder.iterdir()) == []


def test_where_one_of_several_runs_fails_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended = [], []

    def start(self: trainee.Trainee) -> None:
        started.append(self.name)
        if self.name == "b":
            raise RuntimeError("no such drive")

    monkeypatch.setattr(trainee.Trainee, "start", start)
    monkeypatch.setattr(trainee.Trainee, "end", lambda self: ended.append(self.name))
    runs = [trainee.Trainee(name, {}, trainee.Model(1), tmp_path) for name in "abc"]
    with pytest.raises(RuntimeError, match="no such drive"), trainee.side_by_side(runs):
        pytest.fail("one was not there")
    assert sorted(started) == sorted(ended) == ["a", "b", "c"]


@pytest.mark.deepspeed
@pytest.mark.full
def test_memascend_moves_less_and_trains_the_same(tmp_path: Path) -> None:
    rows = rows_of("step", tmp_path)
    *steps, drive = rows
    assert [row["contender"] for row in steps] == list(bench_step.CONTENDERS)
    assert all(row["config"]["losses_equal"] for row in steps)
    assert drive["contender"] == bench_step.DRIVE
    assert drive["figures"]["optimizer_wall_ratio"]["p50"] > 0
    ours = steps[-1]["figures"]
    assert ours["training_bytes_ratio"] < 1
    assert ours["training_wall_ratio"]["p50"] > 0


@pytest.mark.deepspeed
@pytest.mark.full
def test_one_pass_moves_less_than_accumulation_and_trains_the_same(tmp_path: Path) -> None:
    options = ["--accumulation", "4", "--sum-dtype", "fp32", "--tokens", "2", "--one-pass"]
    *steps, _ = rows_of("step", tmp_path, *options)
    assert [row["contender"] for row in steps] == list(bench_step.ONE_PASSES)
    assert all(row["figures"]["training_loss_difference"] < 1e-6 for row in steps)
    _, accumulated, one_pass = (row["figures"]["training_bytes_per_parameter"] for row in steps)
    assert one_pass < 0.75 * accumulated


@pytest.mark.parametrize("stated", [None, True, "auto"])
def test_a_run_that_takes_turns_steps_after_backward_unless_it_says_otherwise(
    stated: object, tmp_path: Path
) -> None:
    optimizer = {"tile_bytes": "1MiB"} | ({} if stated is None else {"during_backward": stated})
    block = {"verify": "reads", "streaming": {"optimizer": optimizer}}
    run = trainee.Trainee("ours", {}, trainee.Model(1), tmp_path, block=block)
    found, expected = parse_block(run.block or {}), parse_block(block)
    assert found.streaming.optimizer.during_backward == (stated or False)
    assert found.streaming.optimizer.tile_bytes == expected.streaming.optimizer.tile_bytes
    assert found.verify == expected.verify
    assert trainee.Trainee("stock", {}, trainee.Model(1), tmp_path).block is None
