"""The stand-in for py-cpuinfo says what py-cpuinfo says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import PathFinder

import cpuinfo

from tests.conftest import STAND_INS


def test_who_asks_in_a_test_or_in_what_it_starts_asks_the_stand_in() -> None:
    command = [sys.executable, "-c", "import cpuinfo; print(cpuinfo.__file__)"]
    started = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert started == cpuinfo.__file__ == str(STAND_INS / "cpuinfo.py")


def test_its_answers_are_those_of_py_cpuinfo() -> None:
    library = PathFinder.find_spec("cpuinfo", [path for path in sys.path if path != str(STAND_INS)])
    assert library is not None
    assert library.origin is not None
    program = library.origin.replace("__init__", "cpuinfo")
    done = subprocess.run(
        [sys.executable, program, "--json"], capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout)
    found = cpuinfo.get_cpu_info()
    assert {"arch", "flags"} <= found.keys()
    for key in found.keys() - {"flags"}:
        assert found[key] == answers[key]
    # The library knows more by other names; which width of vectors there is the kernel's tell.
    assert set(found["flags"]) <= set(answers["flags"])
    assert not {"avx2", "avx512f", "sve"} & set(answers["flags"]) - set(found["flags"])
