"""What the tests rely on to be run beside each other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import conftest

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


class Slow:
    """As much of a slow test as its share depends on."""

    def __init__(self, nodeid: str, marks: tuple[str, ...] = ("full",)) -> None:
        self.nodeid = nodeid
        self.marks = marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


SHARES = [conftest.share_named(text) for text in ("1/3", "2/3", "3/3")]


def shares_of(item: Any) -> list[int]:
    return [number for number, count in SHARES if conftest.is_of_share(item, (number, count))]


def test_each_slow_test_is_in_one_share_and_the_others_are_in_all() -> None:
    cases = [shares_of(Slow(f"tests/parity/test_parity.py::test[{n}]")) for n in range(300)]
    assert all(len(numbers) == 1 for numbers in cases)
    assert all(80 < cases.count([number]) < 120 for number in (1, 2, 3))
    looks = [shares_of(Slow(f"tests/a.py::test_{n}[one run]")) for n in range(9)]
    assert looks == looks[:1] * 9
    one_run = ("full", "one_run")
    file = [shares_of(Slow(f"tests/a.py::test_{n}[{n}]", marks=one_run)) for n in range(9)]
    assert file == file[:1] * 9
    assert len(file[0]) == 1
    assert shares_of(Slow("tests/parity/test_parity.py::test[1]", marks=())) == [1, 2, 3]
    assert conftest.is_of_share(Slow("tests/a.py::test"), conftest.share_named("1/1"))


@pytest.mark.parametrize("text", ["0/3", "4/3", "third", "1", "1/2/3"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        conftest.share_named(text)
