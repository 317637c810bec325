"""Drives that fail in the middle of a job: on one rank, in half a step; and a job started twice."""

from __future__ import annotations

import json
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.ranks import RANKS

from .programs import BLOCK, REPOSITORY, alone, importing_tests, losses, run, training_config

pytestmark = pytest.mark.deepspeed

PROGRAMS = REPOSITORY / "tests" / "integration"
WORLD = 2
#: Far below the half hour after which a collective gives up.
END_TIMEOUT_S = 240.0


@pytest.mark.parametrize("operation", ["read", pytest.param("write", marks=pytest.mark.full)])
def test_no_rank_waits_for_one_whose_drive_failed(tmp_path: Path, operation: str) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(training_config(drive, BLOCK, WORLD)))
    began = time.monotonic()
    done = run(
        [RANKS, str(WORLD), str(PROGRAMS / "fault_program.py"), str(path), operation],
        cwd=tmp_path,
        environment=importing_tests(),
    )
    assert done.returncode != 0
    assert time.monotonic() - began < END_TIMEOUT_S
    assert "step 0 loss" in done.stdout
    assert "the drive of this test is gone" in done.stdout
    assert "went on" not in done.stdout
    assert list(drive.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("is_streamed", [True, False], ids=["tiles", "whole sub-groups"])
def test_after_half_a_step_only_a_checkpoint_goes_on(tmp_path: Path, is_streamed: bool) -> None:
    """A script that catches the error can use no weights of two steps; nor after half a load."""
    drive, checkpoints = tmp_path / "drive", tmp_path / "checkpoints"
    drive.mkdir()
    path = tmp_path / "config.json"
    block = BLOCK | {"streaming": {"optimizer": {"enabled": is_streamed}}}
    path.write_text(json.dumps(training_config(drive, block, 1)))
    done = run(
        [str(PROGRAMS / "torn_program.py"), str(path), str(checkpoints)],
        cwd=tmp_path,
        environment=importing_tests() | alone(),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (full,) = re.findall(r"^full save: (.*)$", done.stdout, re.MULTILINE)
    assert re.match(r"CheckpointError: cannot write .*No space left on device", full)
    assert not list(checkpoints.glob(".memascend*"))
    assert "failing step: StoreError: [Errno 5] the drive of this test failed" in done.stdout
    refusal = re.compile(r"^(\w+) after (\w+): TornStepError: the last opt", re.MULTILINE)
    uses = ("step", "save", "forward", "value", "weights")
    assert refusal.findall(done.stdout) == [
        (use, after) for after in ("step", "load") for use in uses
    ]
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_dir()) == ["good"]
    _, *undisturbed = losses(done.stdout)[:3]
    if is_streamed:
        assert losses(done.stdout)[3:] == undisturbed
    else:
        assert "load: TornStepError: cannot load a checkpoint after half a" in done.stdout


@pytest.mark.full
def test_a_job_started_twice_ends_one_of_them_or_both_are_whole(tmp_path: Path) -> None:
    """On the drive they do not meet: files have no names. The checkpoint is whole, and loads."""
    drive, checkpoints = tmp_path / "drive", tmp_path / "checkpoints"
    drive.mkdir()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(training_config(drive, BLOCK, 1)))
    command = [RANKS, "1", str(PROGRAMS / "kill_program.py"), str(path), str(checkpoints)]

    def train(steps: int) -> subprocess.CompletedProcess[str]:
        return run([*command, "--steps", str(steps)], cwd=tmp_path, environment=importing_tests())

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(train, [6, 6]))
    ends = [done for done in runs if done.returncode == 0]
    assert ends
    for done in runs:
        assert done in ends or "another run is saving there" in done.stdout
    assert (checkpoints / "latest").read_text() == "global_step6"
    resumed = train(7)
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    assert "ready 6" in resumed.stdout
    assert list(drive.iterdir()) == list(checkpoints.glob(".memascend*")) == []
