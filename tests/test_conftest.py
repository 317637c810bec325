"""What the tests rely on to be run beside each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(6))
@pytest.mark.xdist_group("these")
def test_one_of_these(number): pass

@pytest.mark.parametrize("number", range(6))
@pytest.mark.xdist_group("those")
def test_one_of_those(number): pass
"""


def test_one_process_runs_a_group(tmp_path: Path) -> None:
    """Or fixtures of a module, worker groups and oracles are made once more in each process."""
    (tmp_path / "test_groups.py").write_text(TESTS)
    options = ["-n", "2", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_groups.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    runs = re.findall(r"^\[(gw\d)\].* PASSED .*::test_one_of_(\w+)\[", done.stdout, re.MULTILINE)
    assert len(runs) == 12
    assert len(set(runs)) == 2
