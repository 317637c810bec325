"""What a training waits for before a module computes: that module's parameters, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("gathers_program.py")
LAYERS = 12

pytestmark = pytest.mark.deepspeed


def test_no_module_waits_for_the_parameters_of_another(run_program: RunProgram) -> None:
    """The drive is as fast as the layers compute, so that any other wait would show."""
    found: Any = run_program(str(PROGRAM))
    layer_bytes, forward = found["layer"], found["forward"]
    assert forward["compute"] == LAYERS * layer_bytes
    assert forward["read"] > LAYERS * layer_bytes  # and some for backward
    assert forward["needed"] == LAYERS
    # The first layer is read before anything computes, and then all that computes is beside reads.
    assert forward["passed"] == (LAYERS + 1) * layer_bytes
    for phase in ("forward", "whole"):
        assert found[phase].get("ahead", 0) == 0
