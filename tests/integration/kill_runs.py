"""Kills training runs at random moments and resumes each: `python kill_runs.py --runs 50`.

A run saves a checkpoint after every second step; steps go on behind the next forward pass, and
more slowly than need be, so that some kills meet one there. It is killed (SIGKILL) at a moment
drawn from the whole of its training, then started again, and must go on from the last checkpoint
that was complete: losses and final weights equal those of a run that nobody killed, to the bit.
Ends with status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PROGRAM = HERE / "kill_program.py"
STEPS, SAVE_EVERY = 6, 2
#: What each sub-group of a walk takes at least.
SLOW_S = 0.1
#: `gradient_clipping` far above every norm: all steps during backward but the first are guessed.
NEVER_CLIPS = 1e9
#: What a run says while steps go on behind their caller, and if it dies beside one of them.
WALK_BEGINS, WALK_ENDS, BESIDE_THE_WALK = "walk begins", "walk ends", "beside the walk"
MOMENTS = ("in a step", BESIDE_THE_WALK, "in a save", "between")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One killed run.

    Attributes:
        moment: What it was doing.
        saved: Steps in the last checkpoint that it called complete.
        resumed: Steps in the one that the second run began with.
        is_exact: Whether everything after that equals the run that was not killed.
        leftovers: What the two runs left beside checkpoints and below nvme_path.
    """

    moment: str
    saved: int
    resumed: int
    is_exact: bool
    leftovers: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether nothing was lost: the checkpoint under way may have been complete already."""
        return (
            self.is_exact
            and self.resumed in (self.saved, self.saved + SAVE_EVERY * (self.moment == "in a save"))
            and not self.leftovers
        )


class Job:
    """A training in a folder of its own."""

    def __init__(
        self, folder: Path, *, ranks: int = 1, during_backward: bool = False, guesses: bool = False
    ) -> None:
        self.folder, self._ranks = folder, ranks
        self.drive, self.checkpoints = folder / "drive", folder / "checkpoints"
        self.drive.mkdir()
        self._config = folder / "config.json"
        settings = config(self.drive, ranks=ranks, during_backward=during_backward)
        if guesses:
            settings["gradient_clipping"] = NEVER_CLIPS
        self._config.write_text(json.dumps(settings))

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(REPOSITORY / "tests" / "support" / "ranks.py")]
        command += [str(self._ranks), str(PROGRAM), str(self._config), str(self.checkpoints)]
        command += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        search_path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        return subprocess.Popen(
            [*command, "--slow-s", str(SLOW_S), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search_path))},
            start_new_session=True,
        )

    def finish(self) -> tuple[str, float]:
        """Runs to the end; the output, and the seconds from `ready` to the last save's end."""
        process = self.start()
        assert process.stdout is not None
        lines, began, ended = [], 0.0, 0.0
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                began = time.monotonic()
            if line.startswith("saved"):
                ended = time.monotonic()
        output = "".join(lines)
        if process.wait() != 0:
            raise RuntimeError(f"a run that nobody killed failed:\n{output[-4000:]}")
        return output, ended - began

    def kill(self, after_s: float) -> str:
        """Kills all of a run so long after `ready`; the output until then."""
        process = self.start()
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGKILL)
        # Each rank is in a session of its own below the launcher.
        subprocess.run(["pkill", "-KILL", "-f", str(self._config)], check=False)
        lines += list(process.stdout)
        process.wait()
        return "".join(lines)


def config(drive: Path, *, ranks: int = 1, during_backward: bool = False) -> dict[str, Any]:
    """Everything on the drive, several sub-groups, and tiles smaller than they are."""
    on_drive = {"device": "nvme", "nvme_path": str(drive)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0 if during_backward else 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_drive,
            "offload_optimizer": on_drive,
            "sub_group_size": 1_000_000 // ranks,
            "stage3_param_persistence_threshold": 100,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 1_000_000,
        "memascend": {
            "streaming": {
                "optimizer": {"tile_bytes": "1MiB", "during_backward": during_backward},
            },
        },
    }


def results(output: str) -> dict[str, str]:
    """Losses by step, and digests of the final weights."""
    found = {f"step {step}": loss for step, loss in re.findall(r"step (\d+) loss (\S+)", output)}
    return found | dict(re.findall(r"master end (\S+) (\w+)", output))


def outcome_of(killed: str, resumed: str, expected: dict[str, str], job: Job) -> Outcome:
    saved = max(map(int, re.findall(r"^saved (\d+)", killed, re.MULTILINE)), default=0)
    spoken = re.findall(r"^(in a \w+|saved|ready)", killed, re.MULTILINE)
    moment = spoken[-1] if spoken[-1] in MOMENTS else "between"
    if killed.count(WALK_BEGINS) > killed.count(WALK_ENDS):
        moment = BESIDE_THE_WALK
    begin = int(re.findall(r"^ready (\d+)", resumed, re.MULTILINE)[0])
    found = results(resumed)
    due = {
        name: value
        for name, value in expected.items()
        if not name.startswith("step ") or int(name.split()[1]) >= begin
    }
    left = [path for folder in (job.checkpoints, job.drive) for path in folder.glob(".*")]
    left += list(job.drive.iterdir())
    return Outcome(
        moment=moment,
        saved=saved,
        resumed=begin,
        is_exact=found == due,
        leftovers=tuple(sorted({path.name for path in left})),
    )


def run_whole(directory: Path, **kind: Any) -> tuple[str, float]:
    """Makes a run of a kind that nobody kills; what `Job.finish` returns."""
    folder = directory / "whole"
    folder.mkdir()
    return Job(folder, **kind).finish()


def run(
    runs: int,
    seed: int,
    directory: Path | None = None,
    whole: tuple[str, float] | None = None,
    **kind: Any,
) -> list[Outcome]:
    """Kills so many runs of a kind, one after the other, and compares each with a whole one."""
    chance = random.Random(seed)
    outcomes = []
    with tempfile.TemporaryDirectory(dir=directory) as name:
        output, seconds = whole or run_whole(Path(name), **kind)
        expected = results(output)
        for number in track(range(runs), description="killing"):
            folder = Path(name) / str(number)
            folder.mkdir()
            job = Job(folder, **kind)
            killed = job.kill(chance.uniform(0, seconds))
            resumed, _ = job.finish()
            outcomes.append(outcome_of(killed, resumed, expected, job))
    return outcomes


def report(outcomes: list[Outcome]) -> None:
    table = Table(title="Runs killed at random moments, and resumed", title_justify="left")
    for column in ("killed", "runs", "from the last complete checkpoint, exact to the bit"):
        table.add_column(column)
    counts = Counter(outcome.moment for outcome in outcomes)
    right = Counter(outcome.moment for outcome in outcomes if outcome.is_right)
    for moment in MOMENTS:
        table.add_row(moment, str(counts[moment]), str(right[moment]))
    console = Console()
    console.print(table)
    for outcome in outcomes:
        if not outcome.is_right:
            console.print(f"wrong: {outcome}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="where files are written")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--during-backward", action="store_true", help="steps begin there")
    options = parser.parse_args()
    kind = {"ranks": options.ranks, "during_backward": options.during_backward}
    outcomes = run(options.runs, options.seed, options.directory, **kind)
    report(outcomes)
    sys.exit(0 if all(outcome.is_right for outcome in outcomes) else 1)


if __name__ == "__main__":
    main()
