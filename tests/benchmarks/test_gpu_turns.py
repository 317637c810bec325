"""Contenders of the GPU bench that take turns, as far as they can be tried without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_gpu
import gpu_runs
import gpu_turns
import pytest
from gpu_machine import Machine

from memascend.base.units import GIB
from tests.support.gpu_machine_facts import MACHINE, SMALL

LARGE = Machine(1, 139 * GIB, 120 * GIB, 128 * GIB, 500 * GIB)


def turns_of(name: str) -> gpu_turns.Turns:
    (found,) = (turns for turns in gpu_turns.TURNS if turns.name == name)
    return found


def no_lack(run: gpu_runs.Run) -> str:
    return ""


def step(wall_s: float, peak_bytes: int = 7) -> dict[str, Any]:
    return {"training": {"wall_s": wall_s}, "peak_bytes": peak_bytes, "loss": "1.0"}


def test_names_of_cases_are_their_own() -> None:
    names = [run.name for run in gpu_runs.RUNS] + [turns.name for turns in gpu_turns.TURNS]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("name", "contenders"),
    [
        ("qwen2.5-0.5b/4k/x1/in-turns", ["stock", "memascend"]),
        ("qwen2.5-0.5b/64k/x8/in-turns", ["stock", "memascend", "memascend-slices"]),
    ],
)
def test_slices_take_part_where_there_are_micro_steps(name: str, contenders: list[str]) -> None:
    runs, lack = gpu_turns.able(turns_of(name), LARGE, no_lack)
    assert [run.contender for run in runs] == contenders
    assert lack == ""


def test_who_lacks_something_is_left_out_and_nobody_is_compared_with_himself() -> None:
    def without_stock(run: gpu_runs.Run) -> str:
        return "no libaio" if run.is_stock else ""

    runs, _ = gpu_turns.able(turns_of("qwen2.5-0.5b/4k/x8/in-turns"), LARGE, without_stock)
    assert [run.contender for run in runs] == ["memascend", "memascend-slices"]
    runs, lack = gpu_turns.able(turns_of("qwen2.5-0.5b/4k/x1/in-turns"), LARGE, without_stock)
    assert (runs, lack) == ([], "stock: no libaio")


@pytest.mark.parametrize(
    ("place", "where"),
    [("drive_bytes", "on the drive"), ("device_bytes", "of a device's"), ("host_bytes", "of host")],
)
def test_all_have_to_fit_at_once(place: str, where: str) -> None:
    turns = turns_of("qwen2.5-0.5b/64k/x8/in-turns")
    needed = {
        "drive_bytes": gpu_runs.drive_bytes,
        "device_bytes": gpu_runs.device_bytes,
        "host_bytes": lambda run: gpu_runs.host_bytes(run, LARGE),
    }[place]
    each = [*map(needed, turns.runs)]
    between = (max(each) + sum(each)) / 2 / gpu_runs.USABLE
    machine = replace(LARGE, **{place: int(between)})
    assert not any(gpu_runs.why_not(run, machine) for run in turns.runs)
    runs, lack = gpu_turns.able(turns, machine, no_lack)
    assert runs == []
    assert f"at once they need {bench_gpu.format_nbytes(sum(each))}" in lack
    assert where in lack


def test_ratios_are_taken_within_a_round_behind_the_warm_up() -> None:
    stock = [step(100.0), step(1.0), step(2.0), step(4.0), step(8.0)]
    ours = [step(1.0, 9), step(0.5), step(1.0), step(2.0), step(4.0)]
    found = gpu_turns.figures_of({"stock": stock, "memascend": ours})
    assert found["stock"]["ratio"] == [1.0, 1.0, 1.0]
    assert found["memascend"]["ratio"] == [0.5, 0.5, 0.5]
    assert found["memascend"]["step_s"][1] == 1.5
    assert found["memascend"]["rss_bytes"] == 9


def test_the_table_has_a_row_for_each_contender_and_none_without_records() -> None:
    assert gpu_turns.table({}) == ""
    steps = {"stock": [step(2.0)] * 5, "memascend": [step(1.0, 3_100_000_000)] * 5}
    answers = {"": gpu_turns.figures_of(steps)}
    record = {"machine": MACHINE, "state": "done", "answers": answers}
    text = gpu_turns.table({"qwen2.5-0.5b/4k/x1/in-turns": record})
    stock, ours = [line for line in text.splitlines() if line.startswith("| qwen")]
    assert "| stock | 0.0 | 2.00 (2.00 - 2.00) | 1.00 (1.00 - 1.00) |" in stock
    assert "| memascend | 3.1 | 1.00 (1.00 - 1.00) | 0.50 (0.50 - 0.50) |" in ours
    failed = {"machine": MACHINE, "state": "failed", "why": "libcuda says no"}
    assert gpu_turns.table({"qwen2.5-0.5b/4k/x1/in-turns": failed}) == ""


def test_a_child_measures_the_contenders_that_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_gpu, "lack_of", no_lack)
    monkeypatch.setattr(
        gpu_turns,
        "measure",
        lambda runs, machine, folder, rounds: {run.contender: rounds for run in runs},
    )
    found = bench_gpu.measured("qwen2.5-0.5b/4k/x1/in-turns", LARGE, tmp_path, 2)
    assert found == {"stock": 2, "memascend": 2}


@pytest.mark.deepspeed
@pytest.mark.full
def test_turns_are_taken_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = gpu_runs.MODELS["qwen2.5-0.5b"].shape | SMALL
    monkeypatch.setitem(gpu_runs.MODELS, "qwen2.5-0.5b", gpu_runs.Public(shape))
    monkeypatch.setitem(gpu_runs.STEP_TOKENS, "4k", 256)
    ours = [run for run in turns_of("qwen2.5-0.5b/4k/x8/in-turns").runs if not run.is_stock]
    found = gpu_turns.measure(ours, LARGE, tmp_path, accelerator="cpu")
    assert [*found] == ["memascend", "memascend-slices"]
    for figures in found.values():
        assert figures["rss_bytes"] > 0
        assert len(figures["losses"]) == gpu_turns.WARMUPS + gpu_turns.ROUNDS
    micro_steps, whole = (found[name]["losses"][0].split(",") for name in found)
    mean = sum(map(float, micro_steps)) / len(micro_steps)
    assert float(whole[0]) == pytest.approx(mean, rel=1e-3)
