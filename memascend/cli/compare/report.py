"""Puts the columns of a comparison side by side: a table for the terminal, and report.json.

Pure presentation of `Run`s: starts nothing and decides nothing but whether losses are equal.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from memascend.base.units import format_nbytes
from memascend.cli.compare.figures import UNKNOWN, figures, shown_figures
from memascend.cli.compare.run import Run
from memascend.system.files import replace_durably
from memascend.system.mounts import PROC, read_lines

LOG_TAIL_LINE_COUNT = 25
#: Losses printed with no more significant digits are rounded: a float has 9 or 17.
FEW_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """A finished comparison."""

    command: Sequence[str]
    baseline_bytes: int  # resident bytes of a process that has only imported; 0 when not measured
    runs: Sequence[Run]  # in the order in which they ran
    skipped: Mapping[str, str]  # columns that could not be run on this machine, with the reason
    #: The DeepSpeed configuration that the command names; empty where none was found.
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, list[Run]]:
        """The runs of each column, by its name."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.column.name, []).append(run)
        return found

    @property
    def reference(self) -> list[Run] | None:
        """The runs of the first column, which others are compared with; None if they failed."""
        first = next(iter(self.columns.values()), [])
        return first if any(not run.problem for run in first) else None

    @property
    def complete(self) -> list[Run]:
        """The runs that count."""
        return [run for run in self.runs if not run.problem]

    @property
    def loss_difference(self) -> str:
        """The first difference between the losses of any two runs that count, empty when equal."""
        complete = self.complete
        differences = (_first_difference(complete[0], other) for other in complete[1:])
        return next(filter(None, differences), "")

    @property
    def loss_is_compared(self) -> bool:
        """Whether losses of several runs were there to be compared."""
        return len(self.complete) > 1 and any(run.losses for run in self.complete)

    @property
    def loss_verdict(self) -> str:
        """One sentence on the losses."""
        complete = self.complete
        if not any(run.losses for run in complete):
            return "no losses printed"
        count = len(complete[0].losses)
        if len(complete) < 2:
            return f"{count} printed, nothing to compare them with"
        if self.loss_difference:
            return self.loss_difference
        if all(run.exact_losses for run in complete):
            return f"{count} in trainer_state.json, all equal to the last digit"
        digits = max(_digit_count(loss) for run in complete for loss in run.losses)
        if digits <= FEW_DIGITS:
            return f"{count} printed, all equal as printed, with at most {digits} digits"
        return f"{count} printed, all equal to the last digit"

    @property
    def exit_status(self) -> int:
        """0 when every run counts and the losses agree."""
        return 0 if len(self.complete) == len(self.runs) and not self.loss_difference else 1


def table(report: Report) -> Table:
    """Return the table for the terminal."""
    baseline = format_nbytes(report.baseline_bytes)
    about = f"a process that has only imported: {baseline}\n" if report.baseline_bytes else ""
    if any(len(runs) > 1 for runs in report.columns.values()):
        about += "of several runs: median, and least - most below it\n"
    caption = f"{about}losses: {report.loss_verdict}"
    shown = Table(title="memascend compare", caption=caption, caption_justify="left")
    shown.add_column("")
    for name in report.columns:
        shown.add_column(name, justify="right")
    for row in table_rows(report):
        shown.add_row(*row)
    return shown


def table_rows(report: Report) -> list[list[str]]:
    """Return title and cells of each row, with the change against the first column."""
    columns = list(report.columns.values())
    rows = []
    for figure in shown_figures(report.baseline_bytes):
        cells = [
            figure.show(runs, report.reference if runs is not columns[0] else None)
            for runs in columns
        ]
        rows.append([figure.title, *cells])
    for title, index in (("first loss", 0), ("last loss", -1)):
        firsts = [next((run for run in runs if run.losses), None) for runs in columns]
        rows.append([title, *(UNKNOWN if run is None else run.losses[index] for run in firsts)])
    rows.append(["result", *map(_result, columns)])
    return rows


def failures(report: Report) -> list[str]:
    """Return one text per run that does not count: the problem and the end of its log."""
    texts = []
    for run in report.runs:
        if run.problem:
            tail = log_tail(run.log)
            texts.append(f"{run.name} failed: {run.problem}\n{tail}\n  log: {run.log}")
    return texts


def log_tail(log: Path) -> str:
    """Return the last lines of a log, marked as such."""
    return "\n".join(f"  | {line}" for line in read_lines(log)[-LOG_TAIL_LINE_COUNT:])


def write_json(report: Report, path: Path) -> None:
    """Write everything but the samples themselves."""
    content = {
        "command": shlex.join(report.command),
        "machine": machine(),
        "baseline_bytes": report.baseline_bytes,
        "losses": report.loss_verdict,
        "losses_equal": not report.loss_difference if report.loss_is_compared else None,
        "skipped": dict(report.skipped),
        "columns": {
            name: _column_json(runs, report.baseline_bytes) for name, runs in report.columns.items()
        },
    }
    replace_durably(path, json.dumps(content, indent=2) + "\n")


def _column_json(runs: Sequence[Run], baseline_bytes: int) -> dict[str, Any]:
    known = figures(baseline_bytes)
    spreads = {figure.key: figure.of_runs(runs) for figure in known}
    return {
        "environment": dict(runs[0].column.environment),
        **{key: None if spread is None else spread.median for key, spread in spreads.items()},
        "spread": {
            key: None if spread is None else asdict(spread) for key, spread in spreads.items()
        },
        "runs": [
            {
                "problem": run.problem,
                "exit_status": run.exit_status,
                "elapsed_s": round(run.elapsed_s, 3),
                **{figure.key: figure.of_run(run) for figure in known},
                "step_times_s": [round(seconds, 4) for seconds in run.step_times_s],
                "losses": run.losses,
                "log": run.log.name,
            }
            for run in runs
        ],
    }


def machine() -> dict[str, Any]:
    """Describe the machine and the versions, to read the figures with later."""
    versions: dict[str, str | None] = {}
    for name in ("memascend", "deepspeed", "torch", "transformers", "accelerate"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    models = [line for line in read_lines(PROC / "cpuinfo") if line.startswith("model name")]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0].partition(": ")[2] if models else platform.machine(),
        "core_count": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _result(runs: Sequence[Run]) -> str:
    failed = sum(bool(run.problem) for run in runs)
    if not failed:
        return "ok"
    return "failed" if len(runs) == 1 else f"{failed} of {len(runs)} failed"


def _digit_count(number: str) -> int:
    """Return the number of significant digits of a printed number; 0 for nan and inf."""
    mantissa = number.lower().partition("e")[0]
    return len("".join(filter(str.isdigit, mantissa)).lstrip("0"))


def _first_difference(first: Run, other: Run) -> str:
    pair = f"{first.name} and {other.name}"
    for index, (left, right) in enumerate(zip(first.losses, other.losses, strict=False)):
        if left != right:
            return f"{pair} differ, first in loss {index}: {left} and {right}"
    if len(first.losses) != len(other.losses):
        return f"{pair} differ: {len(first.losses)} and {len(other.losses)} losses printed"
    return ""
