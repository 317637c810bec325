"""Runs a benchmark as a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
TIMEOUT_S = 550


def rows_of(
    bench: str, directory: Path, *arguments: str, program: str | None = None
) -> list[dict[str, Any]]:
    """Run a benchmark at its smallest size and return its rows, all that it leaves.

    Args:
        bench: What its rows are of.
        directory: Where it writes; empty.
        arguments: Further ones of the command line.
        program: File in `benchmarks`; None: that of the benchmark.
    """
    file = BENCHMARKS / (program or f"bench_{bench}.py")
    command = [sys.executable, str(file), "--small", *arguments]
    command += ["--out", str(directory), "--directory", str(directory)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert [left.name for left in directory.iterdir()] == [f"{bench}.json"]
    rows: list[dict[str, Any]] = json.loads((directory / f"{bench}.json").read_text())
    assert {row["bench"] for row in rows} == {bench}
    return rows
