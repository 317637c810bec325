"""The emulated device keeps the rules that it finds mistakes by; each is in rules_program.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.device.emulator.build import why_not
from tests.device.rules_program import RULES
from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("rules_program.py")


@pytest.fixture(scope="module")
def problems(run_program: RunProgram) -> Mapping[str, str]:
    if reason := why_not():
        pytest.skip(reason)
    return run_program(str(PROGRAM))


@pytest.mark.parametrize("name", RULES)
def test_the_emulated_device_keeps_its_rules(problems: Mapping[str, str], name: str) -> None:
    assert problems[name] == ""
