"""A job that is told to end does so at once, and leaves nothing behind but its checkpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.ports import free_port

from . import kill_runs
from .programs import REPOSITORY, importing_tests

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

PROGRAM = REPOSITORY / "tests" / "integration" / "kill_program.py"
EXIT_STATUS = 77
STEPS = 1000  # more than it gets to
#: DeepSpeed's launcher looks once a second; far below its patience, after which it kills.
END_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Ended:
    """A job that was told to end while it said that it was at `moment`."""

    output: str
    drive: Path
    checkpoints: Path

    @property
    def saved(self) -> int:
        """Steps in the last checkpoint that it called complete."""
        return max(map(int, re.findall(r"^saved (\d+)", self.output, re.MULTILINE)))


class Job:
    """Started as a user would: `deepspeed program`. Its processes are known by their parents."""

    def __init__(self, folder: Path, *more: str, steps: int = STEPS) -> None:
        self.drive, self.checkpoints = folder / "drive", folder / "checkpoints"
        self.drive.mkdir(exist_ok=True)
        config = folder / "config.json"
        config.write_text(json.dumps(kill_runs.config(self.drive)))
        launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "1"]
        launcher += ["--no_local_rank", "--master_port", str(free_port())]
        program = [str(PROGRAM), str(config), str(self.checkpoints), "--steps", str(steps), *more]
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"DS_ACCELERATOR": "cpu"} | os.environ | importing_tests(),
            start_new_session=True,
        )
        self._lines: list[str] = []

    def wait_for(self, moment: str) -> None:
        """Until it says so after its second save."""
        saved = 0
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            saved += line.startswith("saved")
            if saved >= 2 and line.startswith(moment):
                return
        pytest.fail("ended by itself:\n" + "".join(self._lines)[-4000:])

    def tree(self) -> list[psutil.Process]:
        """The `deepspeed` command, its launcher, and the rank."""
        command = psutil.Process(self.process.pid)
        (launcher,) = command.children()
        (rank,) = launcher.children()
        return [command, launcher, rank]

    def end(self, whom: str) -> Ended:
        """Sends SIGTERM and waits for all processes."""
        tree = self.tree()
        names = ("command", "launcher", "rank")
        for process in tree if whom == "all" else [tree[names.index(whom)]]:
            process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=END_TIMEOUT_S)
        _, alive = psutil.wait_procs(tree, timeout=END_TIMEOUT_S)
        assert alive == []
        return Ended("".join(self._lines) + output, self.drive, self.checkpoints)

    def clear(self) -> None:
        """Ends what a failed test left."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            process.kill()
        self.process.kill()


@pytest.mark.parametrize(
    ("whom", "moment", "exits"),
    [
        ("launcher", "in a step", True),
        ("rank", "in a save", True),
        ("all", "in a save", False),
    ],
)
def test_a_job_that_is_terminated_ends_and_its_checkpoint_is_whole(
    tmp_path: Path, whom: str, moment: str, exits: bool
) -> None:
    job = Job(tmp_path, *(["--exit-status", str(EXIT_STATUS)] if exits else []))
    try:
        job.wait_for(moment)
        time.sleep(0.05)  # into it
        ended = job.end(whom)
    except BaseException:
        job.clear()
        raise
    assert list(ended.drive.iterdir()) == []
    latest = (ended.checkpoints / "latest").read_text()
    assert latest in (f"global_step{ended.saved}", f"global_step{ended.saved + 1}")
    left = {path.name.partition(".lock-")[0] for path in ended.checkpoints.glob(".memascend*")}
    if exits:  # Python was asked to end, so the save could tidy up
        assert left == set()
        assert whom != "rank" or f"return code = {EXIT_STATUS}" in ended.output
    else:
        working = f".memascend-global_step{ended.saved + 1}.saving"
        assert left <= {working, ".memascend-saves"}
    if moment == "in a save" and not exits:
        resumed = Job(tmp_path, steps=ended.saved + 2)
        output, _ = resumed.process.communicate(timeout=120)
        assert f"\nready {latest.removeprefix('global_step')}\n" in output
        assert not list(ended.checkpoints.glob(".memascend*"))
