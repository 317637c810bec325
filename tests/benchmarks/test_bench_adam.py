"""The Adam bench: its bytes, and that it runs at its smallest size and compares results."""

from __future__ import annotations

from pathlib import Path

import bench_adam
import pytest

from tests.support.benchmarks import rows_of

pytest.importorskip("deepspeed")


def test_one_pass_moves_28_bytes_for_a_parameter_with_a_16_bit_gradient() -> None:
    assert bench_adam.pass_bytes(2) == 28
    assert bench_adam.passes_bytes(2) == 48
    # fp32 gradients are not widened.
    assert bench_adam.pass_bytes(4) == 30
    assert bench_adam.passes_bytes(4) == 42


def test_it_runs_at_its_smallest_size(tmp_path: Path) -> None:
    rows = rows_of("adam", tmp_path)
    assert {row["contender"] for row in rows} == {"one pass", "four passes"}
    assert {row["case"] for row in rows} == {"bfloat16 gradients", "float32 gradients"}
    assert all(row["figures"]["one_pass_speedup"] for row in rows)
