"""The Adam bench: its bytes, and that it runs at its smallest size and compares results."""

from __future__ import annotations

from pathlib import Path

import bench_adam
import pytest
import torch

from tests.support.benchmarks import rows_of

pytest.importorskip("deepspeed")


def test_one_pass_moves_28_bytes_for_a_parameter_with_a_16_bit_gradient() -> None:
    assert bench_adam.pass_bytes(2) == 28
    assert bench_adam.passes_bytes(2) == 48
    # fp32 gradients are not widened.
    assert bench_adam.pass_bytes(4) == 30
    assert bench_adam.passes_bytes(4) == 42
    assert bench_adam.halves_bytes(2) == 26
    found = [bench_adam.fewer_bits_bytes(2, name) for name in bench_adam.FEWER_BITS]
    assert found == [24, 16.0625, 12.125]


def test_it_runs_at_its_smallest_size(tmp_path: Path) -> None:
    rows = rows_of("adam", tmp_path)
    contenders = {"one pass", "four passes", "memory alone", "one pass on halves"}
    contenders |= bench_adam.FEWER_BITS.keys()
    assert {row["contender"] for row in rows} == contenders
    dtypes = ("bfloat16", "float32")
    assert {row["case"] for row in rows} == {f"2 x 65536 elements, {d} gradients" for d in dtypes}
    assert all(row["figures"]["one_pass_speedup"] for row in rows)


def test_memory_alone_reads_and_writes_all_of_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(3)
    monkeypatch.setattr(torch, "ones", lambda numel: values[:numel])
    bench_adam.memory_alone(12)()
    assert values.tolist() == [-1, -1, -1]
