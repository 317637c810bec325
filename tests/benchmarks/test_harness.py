"""Every benchmark runs small, and its rows can be read alone; the lists behind it are right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import harness
import pinned_shapes
import pytest

from tests.support.benchmarks import rows_of


def rows_by_run(bench: str, directory: Path, *arguments: str) -> list[dict[str, Any]]:
    rows = rows_of(bench, directory, "--only", bench, *arguments, program="run.py")
    for row in rows:
        assert row["machine"]["versions"]["memascend"]
        assert row["machine"]["kernel"]
        assert row["config"]
    return rows


@pytest.mark.full
def test_the_overflow_bench_times_every_form_and_counts_temporaries(tmp_path: Path) -> None:
    rows = rows_by_run("overflow", tmp_path)
    contenders = ["memascend, flag", "memascend, flag + sum", "isinf, isnan", "amax, amin"]
    assert [(row["case"], row["contender"]) for row in rows] == [
        (dtype, contender)
        for dtype in ("float32", "float16", "bfloat16")
        for contender in contenders
    ]
    for row in rows:
        figures = row["figures"]
        assert 0 < figures["wall_ms"]["p20"] <= figures["wall_ms"]["p50"]
        # What is under test makes no temporary; the stock form makes one or more byte per element.
        numel = row["config"]["nbytes"] // (4 if row["case"] == "float32" else 2)
        if row["contender"].startswith("memascend"):
            assert figures["temporary_bytes"] < numel // 8
        if row["contender"] == "isinf, isnan":
            assert figures["temporary_bytes"] > numel


def test_the_allocator_bench_reserves_little_more_than_was_asked(tmp_path: Path) -> None:
    rows = rows_by_run("allocator", tmp_path)
    assert {row["case"] for row in rows} == set(pinned_shapes.MODELS)
    for row in rows:
        figures = row["figures"]
        assert figures["reserved_bytes"] >= figures["asked_bytes"]
        if row["contender"] == "memascend":
            # One page for each block, and the tail of the last piece.
            limit = row["config"]["count"] * os.sysconf("SC_PAGE_SIZE") + (2 << 20)
            assert figures["reserved_bytes"] <= figures["asked_bytes"] + limit


@pytest.mark.full
def test_the_verify_bench_compares_with_a_store_that_verifies_nothing(tmp_path: Path) -> None:
    rows = rows_by_run("verify", tmp_path)
    ways = {row["contender"] for row in rows}
    assert {"off", "reads", "full", "tables"} <= ways
    for row in rows:
        assert row["figures"]["gb_per_s"]["p50"] > 0
        if row["contender"] == "off":
            assert row["figures"]["time_to_off"]["p50"] == 1


def test_the_nvme_bench_measures_both_engines(tmp_path: Path) -> None:
    rows = rows_by_run("nvme", tmp_path, "--without-deepspeed")
    measured = {row["contender"] for row in rows if "not_run" not in row["figures"]}
    assert "memascend threads" in measured
    for row in rows:
        if "not_run" in row["figures"]:
            assert row["figures"]["not_run"]
        else:
            assert row["figures"]["gb_per_s"]["p50"] > 0
            assert row["machine"]["filesystem"]["type"]


@pytest.mark.deepspeed
@pytest.mark.full
def test_the_nvme_bench_gives_ratios_to_deepspeed_where_its_op_builds(tmp_path: Path) -> None:
    rows = rows_by_run("nvme", tmp_path)
    refused = [row["figures"]["not_run"] for row in rows if "not_run" in row["figures"]]
    if any(row["contender"] == "DeepSpeed aio" and "not_run" in row["figures"] for row in rows):
        pytest.skip(f"DeepSpeed's aio op cannot run here: {refused}")
    ours = [row for row in rows if row["contender"] == "memascend threads"]
    assert ours
    assert all(row["figures"]["speedup"]["p50"] > 0 for row in ours)


@pytest.mark.parametrize("name", pinned_shapes.MODELS)
def test_the_recorded_allocation_lists_are_what_the_architectures_give(name: str) -> None:
    assert pinned_shapes.load(name) == pinned_shapes.document(name)


@pytest.mark.parametrize(
    ("name", "parameters", "steady_gb"),
    [
        ("llama-3.1-8b", 8_030_261_248, 43.46),
        ("qwen2.5-7b", 7_615_616_512, 43.31),
        ("qwen2.5-14b", 14_770_033_664, 68.22),
        ("qwen2.5-32b", 32_763_876_352, 109.09),
    ],
)
def test_the_lists_add_up_to_the_published_sizes_and_the_known_steady_state(
    name: str, parameters: int, steady_gb: float
) -> None:
    content = pinned_shapes.load(name)
    assert content["parameters"] == parameters
    steady = 0
    for allocation in content["allocations"]:
        nbytes = allocation["nbytes"]
        rounded = 1 << (nbytes - 1).bit_length() if allocation["torch"] else nbytes
        steady += allocation["count"] * rounded
    assert steady / 1e9 == pytest.approx(steady_gb, abs=0.02)


def test_contenders_take_turns_and_each_round_starts_with_the_next_one() -> None:
    order: list[str] = []
    contenders = [
        harness.Contender(name, run=lambda name=name: order.append(name)) for name in "abc"
    ]
    samples = harness.interleave(contenders, rounds=2, warmups=1)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 2, "b": 2, "c": 2}


def test_prepare_runs_before_each_run_and_is_not_measured() -> None:
    calls: list[str] = []
    contender = harness.Contender(
        "a", run=lambda: calls.append("run"), prepare=lambda: calls.append("prepare")
    )
    harness.interleave([contender], rounds=1, warmups=1)
    assert calls == ["prepare", "run"] * 2


def test_ratios_are_taken_within_a_round() -> None:
    def samples(*walls_s: float) -> list[harness.Sample]:
        return [harness.Sample(wall_s=wall_s, cpu_s=wall_s / 2) for wall_s in walls_s]

    # The machine is ten times slower in the second round; the ratio is 2 in both.
    ours, theirs = samples(1.0, 10.0), samples(2.0, 20.0)
    assert harness.speedup(ours, theirs) == harness.Spread(2.0, 2.0, 2.0)
    assert harness.cpu_share(ours, theirs) == harness.Spread(0.5, 0.5, 0.5)


def test_percentiles_interpolate_between_neighbours() -> None:
    assert harness.spread([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == harness.Spread(2.0, 3.5, 5.0)
    assert harness.spread([7.0]) == harness.Spread(7.0, 7.0, 7.0)


def test_peak_growth_sees_memory_that_is_already_given_back() -> None:
    grown = harness.peak_rss_growth(lambda: len(b"x" * (64 << 20)))
    assert 63 << 20 <= grown < 80 << 20
    assert harness.peak_rss_growth(lambda: None) < 1 << 20
