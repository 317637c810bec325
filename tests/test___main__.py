"""`python -m memascend` is the command line."""

from __future__ import annotations

import subprocess
import sys

from memascend.version import __version__
from tests.support.source_tree import ROOT


def test_the_package_runs_as_a_program() -> None:
    words = [sys.executable, "-m", "memascend", "--version"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"memascend {__version__}\n")


def test_a_reader_that_closes_early_gets_no_traceback() -> None:
    words = [sys.executable, "-m", "memascend", "plan", "--table"]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
