"""A save or a load that fails on one rank alone: no rank waits for it or goes on without it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.ranks import RANKS

from .programs import BLOCK, REPOSITORY, importing_tests, losses, run, training_config

pytestmark = pytest.mark.deepspeed

PROGRAM = REPOSITORY / "tests" / "integration" / "lone_save_program.py"
WORLD = 2
ELSEWHERE = r"CheckpointError: the checkpoint failed on another rank \(rank\(s\) 1\)"
TORN = "TornStepError: the last optimizer step or load ended half-way"


def test_a_save_or_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    drive, checkpoints = tmp_path / "drive", tmp_path / "checkpoints"
    drive.mkdir()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(training_config(drive, BLOCK, WORLD)))
    done = run(
        [RANKS, str(WORLD), str(PROGRAM), str(path), str(checkpoints)],
        cwd=tmp_path,
        environment=importing_tests(),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    full = "CheckpointError: .*No space left on device; earlier checkpoints are untouched"
    tags = r"CheckpointError: cannot load: the tag is .* differs on another rank"
    expected = {
        "module": (ELSEWHERE, full),
        "optimizer": (ELSEWHERE, full),
        "own folder": (ELSEWHERE, "CheckpointError: .* this rank does not see .*use_node_local"),
        "own latest": (tags, tags),
        "load": (ELSEWHERE, "StoreError: .*the drive of this test is gone"),
        "forward": (TORN, TORN),
        "save": (TORN, TORN),
    }
    for when, texts in expected.items():
        for rank, text in enumerate(texts):
            (found,) = re.findall(rf"^{when} on {rank}: (.*)$", done.stdout, re.MULTILINE)
            assert re.match(text, found), (when, rank, found)
    assert sorted(one.name for one in checkpoints.iterdir() if one.is_dir()) == ["good"]
    assert (checkpoints / "latest").read_text() == "good"
    _, *undisturbed = losses(done.stdout)[:3]
    assert losses(done.stdout)[3:] == undisturbed
