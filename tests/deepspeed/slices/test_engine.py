"""Gradients of passes in slices are those of torch, also behind a disturbed pass."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.programs import REPOSITORY, alone, importing_tests, run
from tests.support.ranks import RANKS

pytestmark = pytest.mark.deepspeed

PROGRAM = REPOSITORY / "tests" / "integration" / "sliced_passes_program.py"


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, [], marks=pytest.mark.full),
        pytest.param(1, ["--tied"], marks=pytest.mark.full),
        (1, ["--without-number", "--leaves"]),
        (2, ["--by-slice", "--fails-in-forward"]),
        pytest.param(2, [], marks=pytest.mark.full),
        # Gradients of layers share buckets.
        pytest.param(2, ["--once"], marks=pytest.mark.full),
        pytest.param(2, ["--tied", "--by-slice"], marks=pytest.mark.full),
    ],
)
def test_gradients_of_disturbed_passes_are_those_of_torch(
    tmp_path: Path, world: int, options: list[str]
) -> None:
    (tmp_path / "drive").mkdir()
    launcher = [RANKS, str(world)] if world > 1 else []
    done = run(
        [*launcher, str(PROGRAM), str(tmp_path / "drive"), *options],
        cwd=tmp_path,
        environment=importing_tests() | (alone() if world == 1 else {}),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (found,) = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    differences = json.loads(found)
    assert differences.pop("reductions") == 1, "at the end of a pass, not of each layer"
    assert len(differences) >= 10
    assert {name: worst for name, worst in differences.items() if max(worst) > 1e-4} == {}
    if world > 1:
        assert "\nENDED memascend: rank 1 of 2 failed alone" in done.stdout
        assert "\nREFUSED rank 1 failed in a pass" in done.stdout
    whole = re.findall(r"memascend: (\w+) computes the whole batch at once", done.stdout)
    assert set(whole) <= {"Block", "Embedding"}
