"""The GPU bench as far as it can be tried without one: models, choice, figures, the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_gpu
import device_trace
import gpu_runs
import pytest
from gpu_machine import Machine

from memascend.base.units import GIB
from tests.support.gpu_machine_facts import MACHINE, SMALL

ROOT = Path(__file__).resolve().parents[2]

LARGE = Machine(1, 139 * GIB, 120 * GIB, 128 * GIB, 500 * GIB)
FIGURES = {
    "step_s": [1.0, 1.25, 1.5],
    "tokens_per_s": 3276.8,
    "rss_bytes": 5_100_000_000,
    "taken_bytes": 5_200_000_000,
    "device_bytes": 7_300_000_000,
    "trace": {"waiting_share": 0.61, "waits": {"the drive": 0.6, "copies": 0.01, "the host": 0.0}},
}


def run_of(name: str) -> gpu_runs.Run:
    (found,) = (run for run in gpu_runs.RUNS if run.name == name)
    return found


# -- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [("qwen2.5-0.5b", 494), ("llama-3.2-1b", 1236), ("llama-3.2-3b", 3213), ("llama-3.1-8b", 8030)],
)
def test_models_have_their_published_sizes_for_torch_and_for_the_plan(
    name: str, millions: int
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = gpu_runs.MODELS[name]
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**model.shape)
        )
    numel = sum(parameter.numel() for parameter in built.parameters())
    assert round(numel / 1e6) == millions
    assert model.shapes.numel == numel


@pytest.mark.parametrize("run", gpu_runs.RUNS, ids=lambda run: run.name)
def test_a_step_has_as_many_tokens_as_its_name_says(run: gpu_runs.Run) -> None:
    tokens = run.sequence_tokens * run.sequences * run.accumulation
    assert tokens == int(run.tokens.removeprefix("context-").removesuffix("k")) * 1024
    config = gpu_runs.config_of(run, LARGE)
    passes, batch = (
        config[key] for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
    )
    assert tokens == run.sequence_tokens * passes * batch
    slices = config.get("memascend", {}).get("micro_batches", {}).get("count", 1)
    assert passes * slices == run.accumulation
    assert ("memascend" in config) == run.contender.startswith("memascend")
    if run.is_stock:  # below that it does not start
        largest = max(tensor.numel for tensor in gpu_runs.MODELS[run.model].shapes.tensors)
        assert config["zero_optimization"]["offload_param"]["buffer_size"] >= largest


def test_contenders_differ_in_the_memory_that_they_plan_with() -> None:
    needed = {
        contender: gpu_runs.host_bytes(run_of(f"llama-3.1-8b/4k/x1/{contender}"), LARGE)
        for contender in gpu_runs.CONTENDERS
    }
    assert needed["memascend"] < 4 * GIB < needed["stock-tuned"] < needed["stock"]
    assert 32 * GIB < needed["memascend-half"] <= LARGE.total_bytes // 2


def test_a_context_is_one_sequence_of_a_model_that_knows_so_many_positions() -> None:
    contexts = [run for run in gpu_runs.RUNS if run.tokens.startswith("context-")]
    assert {run.contender for run in contexts} == {*gpu_runs.CONTEXT_CONTENDERS}
    for run in contexts:
        assert (run.sequences, run.accumulation) == (1, 1)
        known = gpu_runs.MODELS[run.model].shape["max_position_embeddings"]
        assert run.sequence_tokens <= known


def test_checkpoints_are_counted_where_they_are() -> None:
    runs = {
        name: run_of(f"llama-3.1-8b/context-128k/x1/{name}") for name in gpu_runs.CONTEXT_CONTENDERS
    }
    saved = gpu_runs.checkpoint_bytes(runs["memascend"])
    assert saved == 32 * 131072 * 4096 * 2
    host = {name: gpu_runs.host_bytes(run, LARGE) for name, run in runs.items()}
    device = {name: gpu_runs.device_bytes(run) for name, run in runs.items()}
    assert host["memascend-offload"] == host["memascend"] + saved
    # Slots of its own, and nothing that grows with tokens.
    assert host["memascend"] < host["memascend-activations"] < host["memascend"] + GIB
    assert device["memascend"] - device["memascend-activations"] > 0.9 * saved
    assert device["memascend-offload"] == device["memascend-activations"]


def test_a_context_runs_with_activations_on_the_drive_alone() -> None:
    machine = replace(LARGE, host_bytes=28 * GIB, total_bytes=32 * GIB, device_bytes=48 * GIB)
    why = {
        name: gpu_runs.why_not(run_of(f"llama-3.1-8b/context-128k/x1/{name}"), machine)
        for name in gpu_runs.CONTEXT_CONTENDERS
    }
    assert why.pop("memascend-activations") == ""
    assert "device's memory" in why.pop("memascend")
    assert all("host memory" in text for text in why.values())


# -- choice by machine ---------------------------------------------------------------------------


def test_a_large_machine_runs_everything() -> None:
    assert [run.name for run in gpu_runs.RUNS if gpu_runs.why_not(run, LARGE)] == []


@pytest.mark.parametrize(
    ("change", "left_out", "kept"),
    [
        ({"host_bytes": 24 * GIB, "total_bytes": 32 * GIB}, "stock", "memascend"),
        ({"drive_bytes": 140 * GIB}, "stock", "memascend"),
    ],
)
def test_stock_is_left_out_where_memascend_runs(
    change: dict[str, int], left_out: str, kept: str
) -> None:
    machine = replace(LARGE, **change)
    assert gpu_runs.why_not(run_of(f"llama-3.1-8b/4k/x1/{left_out}"), machine)
    assert gpu_runs.why_not(run_of(f"llama-3.1-8b/4k/x1/{kept}"), machine) == ""


def test_a_small_device_runs_small_steps_and_models() -> None:
    machine = replace(LARGE, device_bytes=8 * GIB)
    assert gpu_runs.why_not(run_of("qwen2.5-0.5b/64k/x8/memascend"), machine) == ""
    why = gpu_runs.why_not(run_of("llama-3.1-8b/64k/x1/memascend"), machine)
    assert "device" in why


def case(name: str, why_not: str = "") -> bench_gpu.cases.Case:
    return bench_gpu.cases.Case(name, why_not)


def test_the_first_lines_name_what_fits_and_what_does_not() -> None:
    why = "needs 134.60 GiB on the drive, 60.00 GiB is there"
    some = [case("qwen2.5-0.5b/4k/x1/stock"), case("qwen2.5-0.5b/4k/x1/memascend")]
    some += [case("qwen2.5-0.5b/64k/x1/stock", "needs more"), case("llama-3.1-8b/4k/x1/stock", why)]
    lines = list(bench_gpu.overview(some))
    assert len(lines) == 2
    assert lines[0].startswith("qwen2.5-0.5b: 2 of 3 cases fit")
    assert bench_gpu.format_nbytes(gpu_runs.drive_bytes(run_of(some[0].name))) in lines[0]
    assert lines[1] == f"llama-3.1-8b: none of 1 cases fits: {why}"


def test_small_models_fit_a_drive_of_64_gib() -> None:
    needed = {name: gpu_runs.drive_bytes(run_of(f"{name}/4k/x1/stock")) for name in gpu_runs.MODELS}
    assert needed["qwen2.5-0.5b"] < 9e9
    assert 20e9 < needed["llama-3.2-1b"] < 23e9
    assert needed["llama-3.1-8b"] > 64 * GIB


@pytest.mark.parametrize(
    ("lack", "left_out", "kept"),
    [
        ("async_io", ["stock", "stock-tuned", "stock-offload"], ["memascend", "memascend-offload"]),
        ("checkpoint_offload", ["stock-offload", "memascend-offload"], ["memascend-activations"]),
        ("training", ["stock", "memascend"], []),
    ],
)
def test_rows_whose_needs_are_missing_are_not_here(
    monkeypatch: pytest.MonkeyPatch, lack: str, left_out: list[str], kept: list[str]
) -> None:
    for name in ("training", "async_io", "checkpoint_offload"):
        reason = "the reason" if name == lack else ""
        monkeypatch.setattr(bench_gpu.gpu_lacks, name, lambda reason=reason: reason)
    why = {run.contender: bench_gpu.case_of(run, LARGE).why_not for run in gpu_runs.RUNS}
    assert {why[contender] for contender in left_out} == {"the reason"}
    assert {why[contender] for contender in kept} <= {""}


# -- figures and the table -----------------------------------------------------------------------


def step(wall_s: float, device_bytes: int) -> dict[str, Any]:
    part = {"wall_s": wall_s, "cpu_s": 0.0, "read_bytes": 30, "written_bytes": 12}
    on_device = {"allocated_bytes": device_bytes, "reserved_bytes": 2 * device_bytes}
    return {"training": part, "optimizer": part, "on_device": on_device, "loss": "1.0"}


def test_figures_leave_the_first_steps_out_but_for_peaks() -> None:
    run = run_of("qwen2.5-0.5b/4k/x1/memascend")
    steps = [step(9.0, 50), step(9.0, 10), step(2.0, 10), step(1.0, 10), step(4.0, 10)]
    found = bench_gpu.figures_of(run, steps, world=2)
    assert found["step_s"][1] == 2.0
    assert found["tokens_per_s"] == 2 * 4096 / 2.0
    assert found["device_bytes"] == 50
    assert found["drive_bytes"] == 42
    assert found["steps"] == 3


def records() -> dict[str, dict[str, Any]]:
    name = "qwen2.5-0.5b/4k/x1/"
    return {
        name + "stock": {"machine": MACHINE, "state": "done", "answers": {"": FIGURES}},
        name + "stock-tuned": {"machine": MACHINE, "state": "failed", "why": "libcuda\nsays no"},
        name + "memascend": {
            "machine": MACHINE,
            "state": "done",
            "answers": {"": {"problem": "out of memory", "text": "..."}},
        },
        name + "memascend-half": {"machine": MACHINE, "state": "not here", "why": "needs a drive"},
    }


def test_the_table_has_a_row_for_each_run_and_names_the_machine_once() -> None:
    text = bench_gpu.table(records())
    assert text.count("NVIDIA H200") == 1
    rows = [line for line in text.splitlines() if line.startswith("| qwen")]
    assert {row.count("|") for row in rows} == {bench_gpu.HEADER.splitlines()[0].count("|")}
    measured, failed, out_of_memory, not_here = rows
    assert [cell.strip() for cell in measured.split("|")[5:8]] == ["5.1", "5.2", "7.3"]
    assert "3277" in measured
    assert "61%" in measured
    assert "the drive 60%, copies 1%" in measured
    assert "libcuda" in failed
    assert "out of memory" in out_of_memory
    assert "needs a drive" in not_here


def test_a_row_without_a_trace_has_its_other_figures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    mark = {"ph": "X", "cat": "user_annotation", "name": device_trace.STEP, "ts": 0, "dur": 9}
    trace.write_text(json.dumps({"traceEvents": [mark]}))
    found = FIGURES | {"trace": bench_gpu.trace_of(trace)}
    name = "qwen2.5-0.5b/4k/x1/stock"
    (row,) = (
        line
        for line in bench_gpu.table(
            {name: {"machine": MACHINE, "state": "done", "answers": {"": found}}}
        ).splitlines()
        if line.startswith("| qwen")
    )
    assert "3277" in row
    assert "not here" in row
    assert "no kernel" in row


def test_recorded_rows_become_a_table_in_a_document(tmp_path: Path) -> None:
    for name, record in records().items():
        bench_gpu.case_of(run_of(name)).file(tmp_path).write_text(json.dumps(record))
    document = tmp_path / "page.md"
    document.write_text(f"before\n{bench_gpu.BEGIN}\nold\n{bench_gpu.END}\nafter\n")
    arguments = ["--render", "--out", str(tmp_path), "--document", str(document)]
    assert bench_gpu.main(arguments) == 1  # one of the runs failed
    text = document.read_text()
    assert bench_gpu.table(records()) in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert (tmp_path / "table.md").read_text() == bench_gpu.table(records()) + "\n"


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="once"):
        bench_gpu.written_into("no marks", "table")


def test_the_page_of_measurements_has_the_marks() -> None:
    page = (ROOT / "docs" / "design" / "measurements.md").read_text(encoding="utf-8")
    bench_gpu.written_into(page, "table")


# -- the command line ----------------------------------------------------------------------------


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_bench.sh"), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_a_device_the_script_says_so_and_ends_with_77(tmp_path: Path) -> None:
    done = run_script("--out", str(tmp_path / "out"), "qwen*")
    assert done.returncode == 77, done.stderr
    assert "no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_run_is_listed_with_what_it_lacks() -> None:
    done = run_script("--list", "*/memascend")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == sum(run.contender == "memascend" for run in gpu_runs.RUNS)
    assert all("device's memory" in line for line in lines)


def test_a_child_measures_the_run_that_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "measure", lambda run, machine, folder: {"run": run.name})
    name = "llama-3.2-1b/64k/x8/stock-tuned"
    assert bench_gpu.main(["--child", name, "--nvme-path", str(tmp_path), "--gpus", "1"]) == 0
    answer = capsys.readouterr().out.removeprefix(bench_gpu.cases.MARK)
    assert json.loads(answer) == {"run": name}


@pytest.mark.deepspeed
@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["4k/x8/stock-tuned", "4k/x8/memascend", "context-32k/x1/memascend-activations"],
)
def test_a_run_is_measured_without_a_device_but_for_what_a_device_waits_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = gpu_runs.MODELS["qwen2.5-0.5b"].shape | SMALL
    monkeypatch.setitem(gpu_runs.MODELS, "qwen2.5-0.5b", gpu_runs.Public(shape))
    monkeypatch.setitem(gpu_runs.STEP_TOKENS, "4k", 256)
    monkeypatch.setitem(gpu_runs.STEP_TOKENS, "context-32k", 512)
    run = run_of(f"qwen2.5-0.5b/{name}")
    found = bench_gpu.measure(run, LARGE, tmp_path, accelerator="cpu")
    assert found["steps"] == bench_gpu.STEPS
    assert found["rss_bytes"] > 0
    assert found["tokens_per_s"] > 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if "name" in event}
    assert {device_trace.STEP, device_trace.OPTIMIZER, device_trace.DRIVE} <= names
