"""The Adam bench: its bytes, and that it runs at its smallest size and compares results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
import bench_adam  # noqa: E402


def test_one_pass_moves_28_bytes_for_a_parameter_with_a_16_bit_gradient() -> None:
    assert bench_adam.pass_bytes(2) == 28
    assert bench_adam.passes_bytes(2) == 48
    # fp32 gradients are not widened.
    assert bench_adam.pass_bytes(4) == 30
    assert bench_adam.passes_bytes(4) == 42


def test_it_runs_at_its_smallest_size(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_adam.py", "--small", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    (found,) = tmp_path.glob("*.json")
    rows = json.loads(found.read_text())
    assert {row["contender"] for row in rows} == {"one pass", "four passes"}
    assert {row["case"] for row in rows} == {"bfloat16 gradients", "float32 gradients"}
    assert all(row["figures"]["one_pass_speedup"] for row in rows)
