"""What do Adam's moments in bf16 change of the losses, beside what another seed changes?

`scripts/finetune.py` trains one of its models on one text three times, each in its own process:
with moments in fp32, in bf16 with the same seed, and in fp32 with another seed, that is with other
first weights and other batches. The model computes in fp32: CPUs without instructions for bf16 are
slow with it, and rounded products would hide some of the difference. Losses are compared, not
times. A model learns its text in this many steps, so a difference that grows would show.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import harness

QUESTION = "Losses with Adam's moments in bf16, beside fp32 and another seed"
ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "scripts" / "finetune.py"
CONFIG = ROOT / "configs" / "nvme_cpu.json"
MODEL = "llama-3-tiny"
STEPS = {"small": 4, "large": 300}
#: A loss is shown every so many steps; the mean is over as many at the end.
EVERY = {"small": 2, "large": 50}
BATCH, LENGTH = 4, 128
SEED, OTHER_SEED = 42, 43
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    state_dtype: str
    seed: int

    @property
    def name(self) -> str:
        """As a column is titled."""
        return f"{self.state_dtype}, seed {self.seed}"


#: The first is what the others are compared with.
RUNS = (Run("fp32", SEED), Run("bf16", SEED), Run("fp32", OTHER_SEED))


def configuration(run: Run) -> dict[str, Any]:
    """The demo's, with a block."""
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    optimizer = {"state_dtype": run.state_dtype}
    return config | {"memascend": {"streaming": {"optimizer": optimizer}}}


def train(run: Run, steps: int, directory: Path) -> list[float]:
    """Trains in a process of its own and gives the loss of each step."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(configuration(run)))
        command = [sys.executable, str(PROGRAM), "--deepspeed_config", str(config)]
        command += ["--model", MODEL, "--steps", str(steps), "--seed", str(run.seed)]
        command += [
            "--dtype",
            "fp32",
            "--batch-size",
            str(BATCH),
            "--seq-len",
            str(LENGTH),
            "--nvme-path",
            folder,
        ]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    found = re.findall(r"^step \d+ loss (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or len(found) != steps:
        raise SystemExit(f"{run.name} failed ({done.returncode}):\n{done.stdout[-4000:]}")
    return [float(loss) for loss in found]


def figures(losses: Mapping[Run, float]) -> dict[str, str]:
    """A loss for each run, and what it is above that of the first."""
    base = losses[RUNS[0]]
    made = {}
    for run in RUNS:
        made[run.name] = f"{losses[run]:.4f}"
        if run != RUNS[0]:
            made[f"{run.name}, above"] = f"{losses[run] - base:+.4f}"
    return made


def table(losses: Mapping[Run, Sequence[float]], every: int) -> dict[str, dict[str, str]]:
    """The figures of every so many steps, and of the mean of as many at the end."""
    steps = len(losses[RUNS[0]])
    made = {
        f"step {step}": figures({run: losses[run][step - 1] for run in RUNS})
        for step in range(every, steps + 1, every)
    }
    last = {run: fmean(losses[run][-every:]) for run in RUNS}
    return made | {f"mean of the last {every}": figures(last)}


def run(*, small: bool, directory: Path) -> list[harness.Row]:
    """Trains three times and gives a row for each line of the table."""
    size = "small" if small else "large"
    losses = {}
    for one in RUNS:
        losses[one] = train(one, STEPS[size], directory)
        print(f"{one.name}: {len(losses[one])} steps", flush=True)
    circumstances = harness.machine(directory)
    config = {
        "dtype": "fp32",
        "steps": STEPS[size],
        "batch": BATCH,
        "length": LENGTH,
        "losses": {one.name: values for one, values in losses.items()},
    }
    return [
        harness.Row("states", case, MODEL, shown, config, circumstances)
        for case, shown in table(losses, EVERY[size]).items()
    ]


def run_and_report(options: argparse.Namespace) -> None:
    """What the command line asks for."""
    if options.without_deepspeed:
        return
    rows = run(small=options.small, directory=options.directory)
    harness.report("states", QUESTION, rows, options.out)


if __name__ == "__main__":
    run_and_report(harness.parser(QUESTION).parse_args())
