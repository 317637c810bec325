"""A drive that fails on one rank ends the job on all of them, with that rank's error."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from test_checkpoint import BLOCK, config

from .programs import REPOSITORY, run

pytestmark = [pytest.mark.deepspeed, pytest.mark.slow]

PROGRAM = REPOSITORY / "tests" / "integration" / "fault_program.py"
WORLD = 2
#: Far below the half hour after which a collective gives up.
END_TIMEOUT_S = 240.0


@pytest.mark.parametrize("operation", ["read", "write"])
def test_no_rank_waits_for_one_whose_drive_failed(tmp_path: Path, operation: str) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(drive, BLOCK, WORLD)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD)]
    search_path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    began = time.monotonic()
    done = run(
        [*launcher, str(PROGRAM), str(path), operation],
        cwd=tmp_path,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, search_path))},
    )
    assert done.returncode != 0
    assert time.monotonic() - began < END_TIMEOUT_S
    assert "step 0 loss" in done.stdout
    assert "the drive of this test is gone" in done.stdout
    assert "went on" not in done.stdout
    assert list(drive.iterdir()) == []
