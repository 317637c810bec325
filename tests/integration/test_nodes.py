"""Ranks on two machines, each with folders of its own: two launchers that meet at one address.

They are started by deploy/launch_node.sh, as a Slurm job or a PyTorchJob starts them.

The machines are folders of this one. What differs from ranks of one machine is what a launcher
says: the rank on the machine, how many are there, and where `nvme_path` and checkpoints lie.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.kill_runs import results
from tests.integration.programs import (
    BLOCK,
    REPOSITORY,
    TIMEOUT_S,
    importing_tests,
    losses,
    program_environment,
    training_config,
)
from tests.support.ports import free_port

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

#: Starts the ranks of one machine, in a Slurm job and in a PyTorchJob.
LAUNCH = REPOSITORY / "deploy" / "launch_node.sh"
PROGRAM = REPOSITORY / "tests" / "integration" / "checkpoint_program.py"
KILL_PROGRAM = PROGRAM.with_name("kill_program.py")
WORLD = 2
STEPS = 6
#: After which a rank gives up one that does not answer: more than a busy machine needs to answer,
#: and less than DeepSpeed's ten minutes.
PATIENCE_S = 30.0
#: Far below DeepSpeed's default, and more than a busy machine needs.
END_TIMEOUT_S = 90.0
OWN = {"checkpoint": {"use_node_local_storage": True}}


class Machines:
    """Two ranks, on one machine or on two."""

    def __init__(self, folder: Path, count: int, more: dict[str, Any] | None = None) -> None:
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        # The doctor has tests of its own, and would take longer than the training.
        (self.programs / "memascend").write_text("#!/bin/sh\n")
        (self.programs / "memascend").chmod(0o700)
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

    def spawn(self, checkpoints: Path, *options: str) -> list[subprocess.Popen[str]]:
        """Start training on all machines, to step 6; what is printed goes to a file `output`."""
        port = str(free_port())
        started = []
        for number, place in enumerate(self.folders):
            program = [str(KILL_PROGRAM), str(place / "config.json"), str(checkpoints)]
            command = ["bash", str(LAUNCH), *program, "--steps", str(STEPS), *options]
            with (place / "output").open("w") as output:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=place,
                        env=self._environment(number, port),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        return started

    def finish(self, checkpoints: Path) -> str:
        """Train to step 6 on all machines; return the output of rank 0's."""
        for process, place in zip(self.spawn(checkpoints), self.folders, strict=True):
            assert process.wait(TIMEOUT_S) == 0, self.output(place)[-6000:]
        return self.output(self.folders[0])

    def wait_for(self, printed: str, started: Sequence[subprocess.Popen[str]]) -> None:
        """Return when rank 0 has printed so; what was started must not end before."""
        deadline = time.monotonic() + TIMEOUT_S
        while printed not in self.output(self.folders[0]):
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in started)
            time.sleep(0.005)

    @staticmethod
    def output(place: Path) -> str:
        """Return what the program has printed so far on one machine."""
        return (place / "output").read_text(encoding="utf-8")

    def _environment(self, number: int, port: str) -> dict[str, str]:
        """Return the variables of a machine, as slurm_nodes.sh and Slurm set them."""
        count = len(self.folders)
        environment = program_environment() | importing_tests()
        return environment | {
            "PATH": os.pathsep.join([str(self.programs), environment["PATH"]]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NNODES": str(count),
            "NPROC_PER_NODE": str(WORLD // count),
            "SLURM_NODEID": str(number),
            "SLURM_TMPDIR": str(self.folders[number]),
            "CONFIG_OPTION": "",
        }

    def _run_one(
        self, number: int, port: str, action: str, checkpoint: Path
    ) -> subprocess.CompletedProcess[str]:
        place = self.folders[number]
        paths = [str(place / "config.json"), str(place / "drive"), str(checkpoint)]
        return subprocess.run(
            ["bash", str(LAUNCH), str(PROGRAM), *paths, action],
            cwd=place,
            env=self._environment(number, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


def masters(output: str, when: str) -> list[tuple[str, str]]:
    return re.findall(rf"^master {when} (\S+) (\w+)$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("one")
    return Machines(folder, 1).run("save", [folder / "checkpoint"])


def test_two_machines_train_as_one_and_may_keep_their_checkpoints_to_themselves(
    tmp_path: Path, one_machine: str
) -> None:
    """Those who save in one folder are the runs of a machine that fails, below."""
    own = [tmp_path / "checkpoint0", tmp_path / "checkpoint1"]
    saving = Machines(tmp_path / "saving", 2, OWN)
    saved = saving.run("save", own)
    assert losses(saved) == losses(one_machine) != []
    assert masters(saved, "saved") == masters(one_machine, "saved") != []
    assert saving.drives() == []
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


# -- a machine that fails --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loss:
    """A run that lost one of its two machines, and what became of the other."""

    machines: Machines
    checkpoints: Path
    survivor: Path
    returncode: int
    seconds: float

    @property
    def output(self) -> str:
        return Machines.output(self.survivor)

    @property
    def steps(self) -> int:
        """Steps in the last complete checkpoint."""
        return int((self.checkpoints / "latest").read_text().removeprefix("global_step"))


def processes_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return a launcher and all that it has started, known by their parents."""
    first = psutil.Process(launcher.pid)
    return [first, *first.children(recursive=True)]


def lose(folder: Path, *, lost: int, how: signal.Signals, after_step: int) -> Loss:
    """Train on two machines and send one of them a signal in the step after so many."""
    machines = Machines(folder, 2, {"memascend": BLOCK | {"report": "report.json"}})
    checkpoints = folder / "checkpoints"
    started = machines.spawn(checkpoints, "--timeout-s", str(PATIENCE_S))
    every = list(started)
    try:
        machines.wait_for("in a step\n", started)
        groups = [processes_of(launcher) for launcher in started]  # which takes a while
        every += [process for group in groups for process in group]
        machines.wait_for(f"saved {after_step}\nin a step\n", started)
        for process in groups[lost]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(how)
        began = time.monotonic()
        returncode = started[1 - lost].wait(END_TIMEOUT_S)
        seconds = time.monotonic() - began
    finally:
        for process in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in started:
            process.wait()
    return Loss(machines, checkpoints, machines.folders[1 - lost], returncode, seconds)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Loss:
    """A run whose first machine, that with the meeting point, is gone all of a sudden."""
    return lose(tmp_path_factory.mktemp("killed"), lost=0, how=signal.SIGKILL, after_step=2)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Loss:
    """A run whose second machine answers no more, as if its power or network were gone."""
    return lose(tmp_path_factory.mktemp("silent"), lost=1, how=signal.SIGSTOP, after_step=4)


@pytest.fixture(params=["killed", "silent"])
def loss(request: pytest.FixtureRequest) -> Loss:
    found: Loss = request.getfixturevalue(request.param)
    return found


def test_a_machine_that_is_left_alone_ends_with_an_error(loss: Loss) -> None:
    assert loss.returncode == 1
    assert re.search(r"RuntimeError: .*(reset by peer|closed by peer|Timed out)", loss.output)
    assert "terminate called" not in loss.output
    print(f"ended after {loss.seconds:.1f} s")


def test_a_machine_that_is_left_alone_tells_of_its_own_drives(loss: Loss) -> None:
    rank = loss.machines.folders.index(loss.survivor)
    name = f"report.rank{rank}.json" if rank else "report.json"
    report = json.loads((loss.survivor / name).read_text())
    assert report["machine"] == platform.node()
    assert [volume["path"] for volume in report["volumes"]] == [str(loss.survivor / "drive")]
    assert report["wear"]["written_bytes"] > 0
    assert "host memory of " in loss.output


def test_a_run_goes_on_from_the_last_checkpoint_on_two_machines_and_on_one(
    killed: Loss, silent: Loss, tmp_path: Path
) -> None:
    """Each of the two is what the other would have become, step by step."""
    assert (killed.steps, silent.steps) == (2, 4)
    for found in (killed, silent):
        assert found.machines.drives() == []
    two = results(killed.machines.finish(killed.checkpoints))
    one = results(Machines(tmp_path, 1).finish(silent.checkpoints))
    undisturbed = results(Machines.output(silent.survivor))
    assert {name for name in two if name.startswith("step")} == {f"step {n}" for n in range(2, 6)}
    assert [two[f"step {n}"] for n in (2, 3)] == [undisturbed[f"step {n}"] for n in (2, 3)]
    assert one == {name: value for name, value in two.items() if name not in ("step 2", "step 3")}
    assert any(not name.startswith("step") for name in one), "no weights were compared"
