"""Steps left by an error or Ctrl-C are tried again; a pass that still runs is not taken for one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RANKS

from .programs import BLOCK, REPOSITORY, SAVING, alone, importing_tests, retried_config, run

pytestmark = pytest.mark.deepspeed

PROGRAM = REPOSITORY / "tests" / "integration" / "retry_program.py"
NESTED = PROGRAM.with_name("nested_program.py")


@pytest.mark.parametrize("more", [{}, SAVING], ids=["", "activations"])
@pytest.mark.parametrize(
    "every",
    [
        pytest.param(4, marks=pytest.mark.coarse),
        pytest.param(2, marks=pytest.mark.full),
        pytest.param(1, marks=[pytest.mark.full, pytest.mark.matrix]),
    ],
)
def test_a_step_left_at_any_gather_can_be_tried_again_with_less(
    tmp_path: Path, every: int, more: dict[str, Any]
) -> None:
    """The numbers are those of a run in which nothing failed, and every slot has come back."""
    path = retried_config(tmp_path, BLOCK | more)
    done = run(
        [str(PROGRAM), str(path), "--every", str(every)],
        cwd=tmp_path,
        environment=importing_tests() | alone(),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = [json.loads(line) for line in re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)]
    undisturbed, *retried = found
    assert undisturbed["gathers"] > 2 * 4, "there are gathers in forward and in backward"
    assert len(retried) == 2 * len(range(0, undisturbed["gathers"], every))
    for one in retried:
        assert one["numbers"] == undisturbed["numbers"], one
        assert (one["lost"], one["saved"]) == (0, 0), one


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_engine_calls_inside_a_running_backward_give_the_gradients_of_torch(
    tmp_path: Path, world: int
) -> None:
    """They were dropped, as those of a pass that an error has left."""
    (tmp_path / "drive").mkdir()
    done = run(
        [RANKS, str(world), str(NESTED), str(tmp_path / "drive")],
        cwd=tmp_path,
        environment=importing_tests(),
    )
    (line,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE) or [""]
    assert line, done.stdout[-4000:]
    for kind, cases in json.loads(line).items():
        refused = cases.pop("an_error_that_a_hook_catches")
        assert refused == ["IncompleteGradientError"] * 2, kind
        assert all(found < 1e-6 for both in cases.values() for found in both), (kind, cases)
