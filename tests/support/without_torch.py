"""Runs Python where neither torch nor DeepSpeed can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("torch", "deepspeed", "transformers", "numpy", "matplotlib")


def printed_without_torch(*lines: str) -> str:
    """Run a program, and return what it has printed once it has ended well."""
    absent = [f"sys.modules[{name!r}] = None" for name in ABSENT]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import sys", *absent, *lines])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
