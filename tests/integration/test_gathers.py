"""What a training waits for before a module computes: that module's parameters, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.program import RunProgram, run_program

__all__ = ["run_program"]

PROGRAM = Path(__file__).with_name("gathers_program.py")
LAYERS = 16

pytestmark = pytest.mark.deepspeed


def test_no_module_waits_for_the_parameters_of_another(run_program: RunProgram) -> None:
    """The drive is as fast as the layers compute, so that any other wait would show."""
    found: Any = run_program(str(PROGRAM))
    for phase in ("forward", "whole"):
        assert found[phase]["needed"] > 0
        assert found[phase].get("ahead", 0) == 0
    forward = found["forward"]
    assert forward["read"] == forward["compute"] == LAYERS * found["layer"]
    # The first layer is read before anything computes.
    assert forward["passed"] == (LAYERS + 1) * found["layer"]
