"""The figures of runs: their names, how they are shown, and their spread over repeated runs.

Pure; knows neither tables nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from memascend.base.units import format_nbytes
from memascend.cli.compare.run import Run

UNKNOWN = "n/a"


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure of several runs."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure that runs are compared by."""

    key: str  # its name in report.json
    title: str  # its name for people
    of_run: Callable[[Run], float | None]  # finds it; None where it was not measured
    form: Callable[[float], str] = format_nbytes

    def of_runs(self, runs: Sequence[Run]) -> Spread | None:
        """Return the figure of the runs that count; None where none of them has it."""
        found = [self.of_run(run) for run in runs if not run.problem]
        values = [value for value in found if value is not None]
        return Spread(median(values), min(values), max(values)) if values else None

    def show(self, runs: Sequence[Run], reference: Sequence[Run] | None = None) -> str:
        """Return the text of a column's runs, with the change against `reference`.

        The range of several runs is in a second line.
        """
        spread = self.of_runs(runs)
        if spread is None:
            return UNKNOWN
        text = f"{self.form(spread.median)} {self.change(runs, reference)}".rstrip()
        if len(runs) > 1:
            text += f"\n{self.show_range(spread)}"
        return text

    def show_range(self, spread: Spread) -> str:
        """Return "1.72 - 1.74 GiB", with one unit where both have the same."""
        least, most = self.form(spread.least), self.form(spread.most)
        if least == most:
            return "each time"
        number, _, unit = least.partition(" ")
        return f"{number if most.endswith(f' {unit}') else least} - {most}"

    def change(self, runs: Sequence[Run], reference: Sequence[Run] | None) -> str:
        """Return by how many percent the medians differ, such as "(-25 %)"; empty if unknown."""
        before = self.of_runs(reference) if reference is not None else None
        now = self.of_runs(runs)
        if before is None or now is None or not before.median:
            return ""
        return f"({(now.median / before.median - 1) * 100:+.0f} %)"


def figures(baseline_bytes: int) -> list[Figure]:
    """Return all figures, the most important one first; a baseline of 0 bytes was not measured."""

    def above_baseline(run: Run) -> int | None:
        if not baseline_bytes:
            return None
        return max((sample.above(baseline_bytes) for sample in run.samples), default=None)

    def largest_process(run: Run) -> int | None:
        return max(run.peaks.process_rss_bytes.values(), default=None)

    return [
        Figure("rss_above_baseline_bytes_max", "peak RSS above imports", above_baseline),
        Figure("rss_bytes_max", "peak RSS", _of_samples("total_rss_bytes")),
        Figure("process_rss_bytes_max", "peak RSS, largest process", largest_process),
        Figure("pss_bytes_max", "peak PSS", lambda run: run.peaks.pss_bytes or None),
        Figure("locked_bytes_max", "page-locked", _of_samples("locked_bytes")),
        Figure("registered_bytes_max", "pinned by the kernel", _of_samples("registered_bytes")),
        Figure(
            "step_time_s_mean",
            "step time, mean",
            lambda run: fmean(run.step_times_s) if run.step_times_s else None,
            format_seconds,
        ),
        Figure("read_bytes", "read from SSD", lambda run: run.io_bytes and run.io_bytes[0]),
        Figure("written_bytes", "written to SSD", lambda run: run.io_bytes and run.io_bytes[1]),
        Figure("disk_bytes_max", "disk used", lambda run: run.peaks.disk_bytes or None),
    ]


def shown_figures(baseline_bytes: int) -> list[Figure]:
    """Return the figures for a table, without unmeasured or less useful ones."""
    left_out = {"registered_bytes_max"}
    if not baseline_bytes:
        left_out.add("rss_above_baseline_bytes_max")
    return [figure for figure in figures(baseline_bytes) if figure.key not in left_out]


def format_seconds(value: float) -> str:
    """Return "0.25 s" for 0.25."""
    return f"{value:.2f} s"


def _of_samples(field: str) -> Callable[[Run], int | None]:
    return lambda run: max((getattr(sample, field) for sample in run.samples), default=None)
