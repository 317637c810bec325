"""Contenders of one step on a GPU in turns: ratios of their times within a round.

All are alive at once and step one after the other, so that a machine, a drive or a device that is
busy with something else slows them alike. They have to fit the machine together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from gpu_machine import Machine
from gpu_runs import (
    ACCUMULATIONS,
    CONTEXTS,
    LEAN,
    MODELS,
    SLICES,
    STEP_TOKENS,
    STOCK,
    USABLE,
    Run,
    device_bytes,
    drive_bytes,
    host_bytes,
    trainee_of,
    why_not,
)
from trainee import side_by_side

from memascend.base.units import format_nbytes

#: In place of a contender in the name of a case.
IN_TURNS = "in-turns"
#: The first of a round that is there is what others are compared with.
CONTENDERS = (STOCK, LEAN, SLICES)
WARMUPS, ROUNDS = 1, 4


@dataclass(frozen=True, slots=True)
class Turns:
    """One case: a model, tokens of a step on one device, and the micro-steps they make."""

    model: str
    tokens: str
    accumulation: int

    @property
    def name(self) -> str:
        """Of the case."""
        return f"{self.model}/{self.tokens}/x{self.accumulation}/{IN_TURNS}"

    @property
    def runs(self) -> list[Run]:
        """The contenders; slices need several micro-steps to be slices of."""
        names = CONTENDERS if self.accumulation > 1 else CONTENDERS[:-1]
        return [Run(self.model, self.tokens, self.accumulation, name) for name in names]


TURNS = [
    Turns(model, tokens, accumulation)
    for model in MODELS
    for tokens in STEP_TOKENS
    if tokens not in CONTEXTS
    for accumulation in ACCUMULATIONS
]


def able(turns: Turns, machine: Machine, lack_of: Callable[[Run], str]) -> tuple[list[Run], str]:
    """Return the contenders that the machine can run at once, or none and the reason.

    Args:
        turns: The case.
        machine: What is free on it.
        lack_of: Returns what a run needs besides room and the machine lacks, or "".
    """
    lacks = {run: why_not(run, machine) or lack_of(run) for run in turns.runs}
    runs = [run for run, lack in lacks.items() if not lack]
    if len(runs) < 2:
        return [], "; ".join(f"{run.contender}: {lack}" for run, lack in lacks.items() if lack)
    needed = {
        "on the drive": (sum(map(drive_bytes, runs)), machine.drive_bytes),
        "of a device's memory": (sum(map(device_bytes, runs)), machine.device_bytes),
        "of host memory": (sum(host_bytes(run, machine) for run in runs), machine.host_bytes),
    }
    lack = "; ".join(
        f"at once they need {format_nbytes(wanted)} {where}, {format_nbytes(there)} is there"
        for where, (wanted, there) in needed.items()
        if wanted > USABLE * there
    )
    return ([], lack) if lack else (runs, "")


def measure(
    runs: Sequence[Run],
    machine: Machine,
    folder: Path,
    *,
    rounds: int = ROUNDS,
    accelerator: str = "cuda",
) -> dict[str, Any]:
    """Train all runs in turns; return seconds, ratios to the first, and peaks of resident memory.

    Raises:
        RuntimeError: A run ended; the message has the end of what it printed.
    """
    trainees = {
        run.contender: trainee_of(run, machine, folder, accelerator=accelerator) for run in runs
    }
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in trainees}
    with side_by_side([*trainees.values()]):
        for number in range(WARMUPS + rounds):
            names = [*trainees]
            for _ in range(number % len(names)):  # nobody always inherits the same caches
                names.append(names.pop(0))
            for name in names:
                steps[name].append(trainees[name].step())
    return figures_of(steps)


def figures_of(steps: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The figures of each contender, by its name; the first is the one compared with."""
    taken = {
        name: [step["training"]["wall_s"] for step in found[WARMUPS:]]
        for name, found in steps.items()
    }
    first = next(iter(taken.values()))
    figures = {}
    for name, seconds in taken.items():
        step_s = harness.spread(seconds)
        ratio = harness.spread([one / other for one, other in zip(seconds, first, strict=True)])
        figures[name] = {
            "step_s": [step_s.p20, step_s.p50, step_s.p80],
            "ratio": [ratio.p20, ratio.p50, ratio.p80],
            "rss_bytes": max(step["peak_bytes"] for step in steps[name]),
            "losses": [step["loss"] for step in steps[name]],
        }
    return figures


HEADER = (
    "| model | tokens | divided | contender | peak RSS in steps | step, s | of the first's |\n"
    + "|---" * 7
    + "|"
)


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """All finished cases as Markdown; "" without any. GB are 10^9 bytes."""
    rows = []
    for turns in TURNS:
        record = records.get(turns.name, {})
        for name, figures in record.get("answers", {}).get("", {}).items():
            step_s, ratio = (
                "{1:.2f} ({0:.2f} - {2:.2f})".format(*figures[key]) for key in ("step_s", "ratio")
            )
            cells = [turns.model, turns.tokens, f"x{turns.accumulation}", name]
            cells += [f"{figures['rss_bytes'] / 1e9:.1f}", step_s, ratio]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(["", "", HEADER, *rows]) if rows else ""
