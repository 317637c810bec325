"""`python -m memascend` is the command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memascend.version import __version__
from tests.support.source_tree import ROOT


def test_the_package_runs_as_a_program() -> None:
    words = [sys.executable, "-m", "memascend", "--version"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"memascend {__version__}\n")


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [
        (["plan", "--table"], ""),
        (["plan", "--table"], "1"),
        (["plan", "Llama-3.2-1B"], ""),
        (["--version"], ""),
        ([], ""),
    ],
)
def test_a_reader_that_closes_early_gets_no_traceback(words: list[str], unbuffered: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "memascend", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
