"""A bit that turns on the drive of one rank ends the job on all, named, and reaches no weight."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.ranks import RANKS

from .programs import BLOCK, REPOSITORY, importing_tests, run, training_config

pytestmark = pytest.mark.deepspeed

PROGRAM = REPOSITORY / "tests" / "integration" / "verify_program.py"
WORLD = 2
#: Far below the half hour after which a collective gives up.
END_TIMEOUT_S = 240.0


@pytest.mark.parametrize(
    ("verify", "stream", "saves"),
    [("reads", "low", True), pytest.param("full", "state", False, marks=pytest.mark.full)],
)
def test_a_turned_bit_ends_the_job_before_it_reaches_a_weight(
    tmp_path: Path, verify: str, stream: str, saves: bool
) -> None:
    drive, checkpoint = tmp_path / "drive", tmp_path / "checkpoint"
    drive.mkdir()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(training_config(drive, BLOCK | {"verify": verify}, WORLD)))
    began = time.monotonic()
    done = run(
        [
            *(RANKS, str(WORLD)),
            str(PROGRAM),
            *(str(path), str(drive), stream),
            *(["--checkpoint", str(checkpoint)] if saves else []),
        ],
        cwd=tmp_path,
        environment=importing_tests(),
    )
    assert done.returncode != 0
    assert time.monotonic() - began < END_TIMEOUT_S
    assert "step 0 loss" in done.stdout
    assert f'corrupted data in "{stream}.' in done.stdout, done.stdout[-6000:]
    assert f"in {drive}: the 65536 bytes at offset" in done.stdout
    assert "tensor same" in done.stdout
    assert "went on" not in done.stdout
    if saves:
        assert f"resume from the last complete checkpoint, {checkpoint / 'here'}" in done.stdout
    else:
        assert "no checkpoint is at hand" in done.stdout
    assert list(drive.iterdir()) == []
