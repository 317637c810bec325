"""Puts the columns of a comparison side by side: table, report.json and a picture.

Pure presentation of `Run`s: starts nothing and decides nothing but whether losses are equal.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from memascend.base.units import GIB, format_nbytes
from memascend.cli.compare.run import Run
from memascend.system.files import open_anew, replace_durably
from memascend.system.mounts import PROC, read_lines

LOG_TAIL_LINE_COUNT = 25
_UNKNOWN = "n/a"


@dataclass(frozen=True, slots=True)
class Report:
    """A finished comparison.

    Attributes:
        baseline_bytes: Resident bytes of a process that has only imported; 0 when not measured.
        skipped: Columns that could not be run on this machine, with the reason.
    """

    command: Sequence[str]
    baseline_bytes: int
    runs: Sequence[Run]
    skipped: dict[str, str]

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
    def loss_verdict(self) -> str:
        """One sentence on the losses."""
        complete = self.complete
        if not any(run.losses for run in complete):
            return "no losses printed"
        count = len(complete[0].losses)
        if len(complete) < 2:
            return f"{count} printed, nothing to compare them with"
        return self.loss_difference or f"{count} printed, all equal to the last digit"

    @property
    def exit_status(self) -> int:
        """0 when every run counts and the losses agree."""
        return 0 if len(self.complete) == len(self.runs) and not self.loss_difference else 1


def table(report: Report) -> Table:
    """Return the table for the terminal."""
    baseline = format_nbytes(report.baseline_bytes)
    about = f"a process that has only imported: {baseline}\n" if report.baseline_bytes else ""
    caption = f"{about}losses: {report.loss_verdict}"
    shown = Table(title="memascend compare", caption=caption, caption_justify="left")
    shown.add_column("")
    for run in report.runs:
        shown.add_column(run.column.name, justify="right")
    reference = report.runs[0] if len(report.complete) > 1 and not report.runs[0].problem else None
    for title, value, form in _rows(report.baseline_bytes):
        cells = []
        for run in report.runs:
            found = None if run.problem else value(run)
            cells.append(_UNKNOWN if found is None else form(found))
            if reference is not None and run is not reference and found is not None:
                cells[-1] += _change(value(reference), found)
        shown.add_row(title, *cells)
    for title, index in (("first loss", 0), ("last loss", -1)):
        losses = [run.losses[index] if run.losses else _UNKNOWN for run in report.runs]
        shown.add_row(title, *losses)
    shown.add_row("result", *["failed" if run.problem else "ok" for run in report.runs])
    return shown


def failures(report: Report) -> list[str]:
    """Return one text per run that does not count: the problem and the end of its log."""
    texts = []
    for run in report.runs:
        if run.problem:
            tail = log_tail(run.log)
            texts.append(f"{run.column.name} failed: {run.problem}\n{tail}\n  log: {run.log}")
    return texts


def log_tail(log: Path) -> str:
    """Return the last lines of a log, marked as such."""
    return "\n".join(f"  | {line}" for line in read_lines(log)[-LOG_TAIL_LINE_COUNT:])


def write_json(report: Report, path: Path) -> None:
    """Write everything but the samples themselves."""
    columns = {
        run.column.name: {
            "environment": dict(run.column.environment),
            "problem": run.problem,
            "exit_status": run.exit_status,
            "elapsed_s": round(run.elapsed_s, 3),
            **{key: measure(run) for key, measure in _measures(report.baseline_bytes).items()},
            "step_times_s": [round(seconds, 4) for seconds in run.step_times_s],
            "losses": run.losses,
            "log": run.log.name,
        }
        for run in report.runs
    }
    content = {
        "command": shlex.join(report.command),
        "machine": machine(),
        "baseline_bytes": report.baseline_bytes,
        "losses": report.loss_verdict,
        "losses_equal": not report.loss_difference,
        "skipped": report.skipped,
        "columns": columns,
    }
    replace_durably(path, json.dumps(content, indent=2) + "\n")


def write_picture(report: Report, path: Path) -> bool:
    """Draw resident memory over time, one line per run, each peak marked.

    Returns:
        False, and nothing is drawn, where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for run in report.runs:
        if not run.samples:
            continue
        times = [sample.time_s for sample in run.samples]
        sizes = [sample.above(report.baseline_bytes) / GIB for sample in run.samples]
        peak = max(range(len(sizes)), key=sizes.__getitem__)
        (line,) = axes.plot(times, sizes, label=f"{run.column.name}: peak {sizes[peak]:.2f} GiB")
        axes.plot(times[peak], sizes[peak], marker="v", color=line.get_color())
        axes.axhline(sizes[peak], color=line.get_color(), linewidth=0.6, linestyle=":")
    above = " above the import baseline" if report.baseline_bytes else ""
    axes.set(xlabel="seconds", ylabel="GiB", title=f"Resident memory{above}", ylim=(0, None))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    with open(open_anew(path), "wb") as file:
        figure.savefig(file, dpi=130)
    return True


def machine() -> dict[str, Any]:
    """Describe where this ran, for whoever reads the figures later."""
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


def _measures(baseline_bytes: int) -> dict[str, Callable[[Run], float | None]]:
    """Return the figures of a run, by their name in report.json."""
    return {
        "rss_above_baseline_bytes_max": lambda run: (
            max((s.above(baseline_bytes) for s in run.samples), default=None)
            if baseline_bytes
            else None
        ),
        "rss_bytes_max": lambda run: max((s.total_rss_bytes for s in run.samples), default=None),
        "pss_bytes_max": lambda run: run.peaks.pss_bytes or None,
        "process_rss_bytes_max": lambda run: max(
            run.peaks.process_rss_bytes.values(), default=None
        ),
        "locked_bytes_max": lambda run: max((s.locked_bytes for s in run.samples), default=None),
        "registered_bytes_max": lambda run: max(
            (s.registered_bytes for s in run.samples), default=None
        ),
        "step_time_s_mean": lambda run: fmean(run.step_times_s) if run.step_times_s else None,
        "read_bytes": lambda run: run.io_bytes[0] if run.io_bytes else None,
        "written_bytes": lambda run: run.io_bytes[1] if run.io_bytes else None,
        "disk_bytes_max": lambda run: run.peaks.disk_bytes or None,
    }


_Row = tuple[str, Callable[[Run], float | None], Callable[[float], str]]


def _rows(baseline_bytes: int) -> list[_Row]:
    measures = _measures(baseline_bytes)
    titles = {
        "rss_above_baseline_bytes_max": "peak RSS above imports",
        "rss_bytes_max": "peak RSS",
        "process_rss_bytes_max": "peak RSS, largest process",
        "pss_bytes_max": "peak PSS",
        "locked_bytes_max": "page-locked",
        "step_time_s_mean": "step time, mean",
        "read_bytes": "read from SSD",
        "written_bytes": "written to SSD",
        "disk_bytes_max": "disk used",
    }
    if not baseline_bytes:
        del titles["rss_above_baseline_bytes_max"]
    return [
        (title, measures[name], _seconds if name.endswith("_s_mean") else format_nbytes)
        for name, title in titles.items()
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _change(reference: float | None, value: float) -> str:
    return f" ({(value / reference - 1) * 100:+.0f} %)" if reference else ""


def _first_difference(first: Run, other: Run) -> str:
    pair = f"{first.column.name} and {other.column.name}"
    for index, (left, right) in enumerate(zip(first.losses, other.losses, strict=False)):
        if left != right:
            return f"{pair} differ, first in loss {index}: {left} and {right}"
    if len(first.losses) != len(other.losses):
        return f"{pair} differ: {len(first.losses)} and {len(other.losses)} losses printed"
    return ""
