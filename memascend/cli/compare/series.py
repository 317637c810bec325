"""From runs to charts: of memory, components, drives, steps and losses, over time.

Knows runs and their samples; nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from memascend.base.units import format_nbytes
from memascend.cli.compare.charts import Axis, Chart, Point, Series, area_chart, line_chart
from memascend.cli.compare.figures import format_seconds
from memascend.cli.compare.report import Report
from memascend.cli.compare.run import Run
from memascend.ledger.trace import Mark

#: Ticks of bytes are powers of it.
BINARY = 1024
#: Colours that the style sheet has for components; the last is for all that are left.
SHADE_COUNT = 8

#: As losses are counted, from 0 on.
STEPS = Axis("step", from_zero=False, is_whole=True)


def style_of(name: str) -> str:
    """Return the class of the style sheet that gives a column its colour."""
    return f"column-{name}"


def memory_charts(report: Report) -> list[Chart]:
    """Return resident and page-locked memory over time, one line for each run."""
    above = " above a process that has only imported" if report.baseline_bytes else ""
    resident = _of_runs(
        report, lambda run: [(s.time_s, s.above(report.baseline_bytes)) for s in run.samples]
    )
    locked = _of_runs(report, lambda run: [(s.time_s, s.locked_bytes) for s in run.samples])
    return _drawn(
        line_chart(f"Resident memory{above}", resident, form=format_nbytes, base=BINARY),
        line_chart("Page-locked memory", locked, form=format_nbytes, base=BINARY),
    )


def component_charts(report: Report) -> list[Chart]:
    """Return memascend's own memory by component, for the first run of a column that has it."""
    found = []
    for name, runs in report.columns.items():
        run = next((run for run in runs if run.recording.marks), None)
        if run is not None:
            chart = area_chart(
                f"Host memory of rank 0 by component, {name}",
                _components(run),
                form=format_nbytes,
                base=BINARY,
            )
            found.append(chart)
    return _drawn(*found)


def drive_charts(report: Report) -> list[Chart]:
    """Return charts of bytes read and written per second by each drive, a line for each run."""
    names = {name for run in report.runs for s in run.drive_samples for name in s.counters}
    return _drawn(
        *(
            line_chart(
                f"Drive {name}: {what} per second",
                _of_runs(report, partial(_rates, name=name, counter=f"{what}_bytes")),
                form=_rate,
                base=BINARY,
            )
            for name in sorted(names)
            for what in ("read", "written")
        )
    )


def step_chart(report: Report) -> list[Chart]:
    """Return the time from each printed loss to the next, which is that of the next one's step."""
    series = _of_runs(report, lambda run: list(enumerate(run.step_times_s, start=1)))
    return _drawn(line_chart("Time of each step", series, form=format_seconds, x_axis=STEPS))


def loss_chart(report: Report) -> list[Chart]:
    """Return the printed losses; those that are no numbers are left out."""
    series = _of_runs(
        report,
        lambda run: [
            (index, float(loss))
            for index, loss in enumerate(run.losses)
            if math.isfinite(float(loss))
        ],
    )
    return _drawn(line_chart("Loss", series, form="{:.4g}".format, from_zero=False, x_axis=STEPS))


def _of_runs(report: Report, points: Callable[[Run], Sequence[Point]]) -> list[Series]:
    """Return one series for each run; the first of a column stands for it, others are faint."""
    return [
        Series(name, style_of(name), points(run), is_muted=index > 0)
        for name, runs in report.columns.items()
        for index, run in enumerate(runs)
    ]


def _components(run: Run) -> list[Series]:
    marks = _changes(run.recording.marks)
    peaks: dict[str, int] = {}
    for mark in marks:
        for name, nbytes in mark.measures.components.items():
            peaks[name] = max(peaks.get(name, 0), nbytes)
    ranked = sorted(peaks, key=lambda name: -peaks[name])
    named, rest = ranked[: SHADE_COUNT - 1], ranked[SHADE_COUNT - 1 :]

    def sums(names: Sequence[str]) -> list[Point]:
        return [(0.0, 0.0)] + [
            (
                mark.time_s - run.started_s,
                sum(mark.measures.components.get(name, 0) for name in names),
            )
            for mark in marks
        ]

    series = [Series(name, f"shade-{index}", sums([name])) for index, name in enumerate(named)]
    others = Series("others", f"shade-{SHADE_COUNT - 1}", sums(rest))
    return [*series, others] if rest else series


def _changes(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks at which components have other sizes than before, and the last."""
    changed = [
        after
        for before, after in pairwise(marks)
        if after.measures.components != before.measures.components
    ]
    return [marks[0], *changed, marks[-1]]


def _rates(run: Run, name: str, counter: str) -> list[Point]:
    known = [
        (sample.time_s, getattr(sample.counters[name], counter))
        for sample in run.drive_samples
        if name in sample.counters
    ]
    return [
        (after_s, (after - before) / (after_s - before_s))
        for (before_s, before), (after_s, after) in pairwise(known)
        if after_s > before_s
    ]


def _rate(bytes_per_second: float) -> str:
    return f"{format_nbytes(bytes_per_second)}/s"


def _drawn(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]
