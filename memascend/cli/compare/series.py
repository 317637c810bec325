"""From runs to charts: of memory, components, drives, steps and losses, over time.

Knows runs and their samples; nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from memascend.base.charts import Chart, Point, Quantity, Series, area_chart, bar_chart, line_chart
from memascend.cli.compare.report import Report
from memascend.cli.compare.run import Run
from memascend.cli.compare.steps import PhaseTime
from memascend.ledger.trace import Mark


def memory_charts(report: Report) -> list[Chart]:
    """Return resident and page-locked memory over time, one line for each run."""
    above = " above a process that has only imported" if report.baseline_bytes else ""
    resident = _of_runs(
        report, lambda run: [(s.time_s, s.above(report.baseline_bytes)) for s in run.samples]
    )
    locked = _of_runs(report, lambda run: [(s.time_s, s.locked_bytes) for s in run.samples])
    return _drawn(
        line_chart(f"Resident memory{above}", Quantity("resident memory", "B"), resident),
        line_chart("Page-locked memory", Quantity("page-locked memory", "B"), locked),
    )


def component_charts(report: Report) -> list[Chart]:
    """Return memascend's own memory by component, for the first run of a column that has it."""
    found = []
    for column, runs in report.columns.items():
        run = next((run for run in runs if run.recording.marks), None)
        if run is not None:
            marks = _changes(run.recording.marks)
            sizes = {
                name: [0, *(mark.measures.components.get(name, 0) for mark in marks)]
                for name in dict.fromkeys(name for m in marks for name in m.measures.components)
            }
            chart = area_chart(
                f"Host memory of rank 0 by component, {column}",
                Quantity("host memory", "B"),
                [0.0, *(mark.time_s - run.started_s for mark in marks)],
                {name: sizes[name] for name in sorted(sizes, key=lambda name: -max(sizes[name]))},
            )
            found.append(chart)
    return _drawn(*found)


def phase_chart(title: str, phases: Sequence[PhaseTime]) -> Chart:
    """Return the phases of a step, with the waits in each."""
    return bar_chart(
        title,
        Quantity("time of a step", "s"),
        {
            "computing": [phase.computing_s for phase in phases],
            "waiting for the drive": [phase.drive_s for phase in phases],
            "waiting for the device": [phase.device_s for phase in phases],
            "waiting for the optimizer": [phase.optimizer_s for phase in phases],
        },
        bars=[phase.phase for phase in phases],
    )


def drive_charts(report: Report) -> list[Chart]:
    """Return charts of bytes read and written per second by each drive, a line for each run."""
    names = {name for run in report.runs for s in run.drive_samples for name in s.counters}
    return _drawn(
        *(
            line_chart(
                f"Drive {name}: {what} per second",
                Quantity(f"bytes {what}", "B/s"),
                _of_runs(report, partial(_rates, name=name, counter=counter)),
            )
            for name in sorted(names)
            for what, counter in (("read", "read_bytes"), ("written", "write_bytes"))
        )
    )


def step_chart(report: Report) -> list[Chart]:
    """Return the time from each printed loss to the next, which is that of the next one's step."""
    series = _of_runs(report, lambda run: list(enumerate(run.step_times_s, start=1)))
    return _drawn(
        line_chart("Time of each step", Quantity("time of a step", "s"), series, by_step=True)
    )


def loss_chart(report: Report) -> list[Chart]:
    """Return the printed losses, counted from 0 on; those that are no numbers are left out."""
    series = _of_runs(
        report,
        lambda run: [
            (index, float(loss))
            for index, loss in enumerate(run.losses)
            if math.isfinite(float(loss))
        ],
    )
    quantity = Quantity("loss", from_zero=False)
    return _drawn(line_chart("Loss", quantity, series, by_step=True, is_overlaid=True))


def _of_runs(report: Report, points: Callable[[Run], Sequence[Point]]) -> list[Series]:
    """Return one series for each run; the first of a column stands for it, others are faint."""
    return [
        Series(name, points(run), colour, is_faint=index > 0)
        for colour, (name, runs) in enumerate(report.columns.items())
        for index, run in enumerate(runs)
    ]


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


def _drawn(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]
