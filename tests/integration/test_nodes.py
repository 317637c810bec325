"""Ranks on two machines, each with folders of its own: two launchers that meet at one address.

The machines are folders of this one. What differs from ranks of one machine is what a launcher
says: the rank on the machine, how many are there, and where `nvme_path` and checkpoints lie.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.programs import BLOCK, REPOSITORY, free_port, losses, run, training_config

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

PROGRAM = REPOSITORY / "tests" / "integration" / "checkpoint_program.py"
WORLD = 2
OWN = {"checkpoint": {"use_node_local_storage": True}}


class Machines:
    """Two ranks, on one machine or on two."""

    def __init__(self, folder: Path, count: int, more: dict[str, Any] | None = None) -> None:
        self.folders = [folder / f"machine{number}" for number in range(count)]
        for place in self.folders:
            (place / "drive").mkdir(parents=True)
            config = training_config(place / "drive", BLOCK, WORLD) | (more or {})
            (place / "config.json").write_text(json.dumps(config))

    def run(self, action: str, checkpoints: list[Path]) -> str:
        """Run the program on all machines at once; return the output of rank 0's."""
        done = self.start(action, checkpoints)
        for one in done:
            assert one.returncode == 0, one.stdout[-6000:]
        return done[0].stdout

    def start(self, action: str, checkpoints: list[Path]) -> list[subprocess.CompletedProcess[str]]:
        """Run the program on all machines at once; return what came of it on each."""
        port = str(free_port())
        with ThreadPoolExecutor(len(self.folders)) as pool:
            numbers = range(len(self.folders))
            running = [
                pool.submit(self._run_one, number, port, action, checkpoint)
                for number, checkpoint in zip(numbers, checkpoints, strict=True)
            ]
            return [one.result() for one in running]

    def drives(self) -> list[Path]:
        """Return what is visible in the folders of all drives."""
        return [path for place in self.folders for path in (place / "drive").iterdir()]

    def _run_one(
        self, number: int, port: str, action: str, checkpoint: Path
    ) -> subprocess.CompletedProcess[str]:
        place, count = self.folders[number], len(self.folders)
        launcher = [
            *("-m", "torch.distributed.run"),
            *("--nnodes", str(count), "--node_rank", str(number)),
            *("--nproc_per_node", str(WORLD // count)),
            *("--master_addr", "127.0.0.1", "--master_port", port),
        ]
        paths = [str(place / "config.json"), str(place / "drive"), str(checkpoint)]
        search_path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        return run(
            [*launcher, str(PROGRAM), *paths, action],
            cwd=place,
            environment={"PYTHONPATH": os.pathsep.join(filter(None, search_path))},
        )


def masters(output: str, when: str) -> list[tuple[str, str]]:
    return re.findall(rf"^master {when} (\S+) (\w+)$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("one")
    return Machines(folder, 1).run("save", [folder / "checkpoint"])


def test_two_machines_train_as_one_and_resume_on_one(tmp_path: Path, one_machine: str) -> None:
    shared = tmp_path / "checkpoint"
    two = Machines(tmp_path / "two", 2)
    saved = two.run("save", [shared, shared])
    assert losses(saved) == losses(one_machine) != []
    assert masters(saved, "saved") == masters(one_machine, "saved") != []
    assert two.drives() == []
    resumed = Machines(tmp_path / "one", 1).run("load", [shared])
    assert masters(resumed, "loaded") == masters(saved, "saved")
    assert losses(resumed) == losses(saved)[2:] != []


def test_machines_that_keep_their_checkpoints_to_themselves(
    tmp_path: Path, one_machine: str
) -> None:
    own = [tmp_path / "checkpoint0", tmp_path / "checkpoint1"]
    saved = Machines(tmp_path / "saving", 2, OWN).run("save", own)
    assert losses(saved) == losses(one_machine) != []
    assert all((checkpoint / "here").is_dir() for checkpoint in own)
    resumed = Machines(tmp_path / "resuming", 2, OWN).run("load", own)
    assert masters(resumed, "loaded") == masters(saved, "saved") != []
    assert losses(resumed) == losses(saved)[2:] != []


def test_machines_with_other_files_are_refused_on_both(tmp_path: Path) -> None:
    two = Machines(tmp_path, 2)
    path = two.folders[1] / "config.json"
    config = json.loads(path.read_text())
    config["memascend"]["streaming"] = {"optimizer": {"tile_bytes": "1MiB"}}
    path.write_text(json.dumps(config))
    first, second = two.start("save", [tmp_path / "checkpoint"] * 2)
    assert first.returncode != 0
    assert "rank(s) 1 differ from rank 0" in first.stdout
    assert second.returncode != 0
    assert "tile_bytes is 1048576 on rank 1" in second.stdout


def test_a_machine_whose_drive_cannot_be_used_ends_both(tmp_path: Path) -> None:
    two = Machines(tmp_path, 2)
    two.folders[1].joinpath("drive").rmdir()
    two.folders[1].joinpath("drive").touch()
    first, second = two.start("save", [tmp_path / "checkpoint"] * 2)
    assert "MemAscendError: rank(s) 1 cannot begin" in first.stdout
    assert "Not a directory" in second.stdout
