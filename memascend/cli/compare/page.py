"""The page: arranges the results of a comparison, and writes them as one HTML file.

The file needs nothing besides itself: style and pictures are in it, and there is no script. Text
from outside (commands, configurations, paths, logs) is escaped by the template engine.
"""

from __future__ import annotations

import base64
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memascend.base import charts
from memascend.base.charts import Chart, Palette
from memascend.base.units import format_nbytes
from memascend.cli.compare import report as comparison
from memascend.cli.compare import series
from memascend.cli.compare.figures import UNKNOWN, Figure, figures, format_seconds
from memascend.cli.compare.report import Report
from memascend.cli.compare.run import Run
from memascend.cli.compare.steps import PhaseTime, phase_times
from memascend.config.environment import DISABLE_VARIABLE
from memascend.system.files import replace_durably

#: Figures on top of the page; of each group the first that is known.
HEADLINES = (
    ("rss_above_baseline_bytes_max", "rss_bytes_max"),
    ("locked_bytes_max", "registered_bytes_max"),
    ("step_time_s_mean",),
)

#: Rows in the table of losses; report.json has all.
LOSS_ROWS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Value:
    """One column's part of a headline."""

    name: str
    text: str
    detail: str
    change: str  # difference to the first column, such as "-25 %"; empty for that one


def write_page(report: Report, path: Path) -> None:
    """Write the report as HTML, in the place of an older one."""
    replace_durably(path, render(report))


def render(report: Report) -> str:
    """Return the document."""
    # torch requires jinja2, so it is there wherever memascend is installed.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["nbytes"] = format_nbytes
    environment.filters["seconds"] = format_seconds
    environment.filters["address"] = _address
    return environment.get_template("page.html.jinja").render(_content(report))


def _address(chart: Chart, palette: Palette) -> str:
    """Return the chart's picture as an address that contains it."""
    content = base64.b64encode(chart.picture(palette=palette)).decode()
    return f"data:image/svg+xml;base64,{content}"


def _content(report: Report) -> dict[str, Any]:
    names = list(report.columns)
    return {
        "report": report,
        "command": shlex.join(report.command),
        "names": names,
        "verdict": _verdict(report),
        "machine": comparison.machine(),
        "headlines": _headlines(report),
        "rows": comparison.table_rows(report),
        "is_repeated": any(len(runs) > 1 for runs in report.columns.values()),
        "failures": [(run, comparison.log_tail(run.log)) for run in report.runs if run.problem],
        "loss_rows": _loss_rows(report),
        "losses_longest": max((len(run.losses) for run in report.complete), default=0),
        "breakdowns": _breakdowns(report),
        "ledgers": [
            (run, run.recording.ledger) for run in _recorded(report) if run.recording.ledger
        ],
        "settings": _settings(report),
        "config": json.dumps(report.config, indent=2, default=str) if report.config else "",
        **_charts(report),
    }


def _charts(report: Report) -> dict[str, Any]:
    reason = charts.why_none()
    drawn = {
        "memory": series.memory_charts(report) + series.component_charts(report),
        "drives": series.drive_charts(report),
        "steps": [
            series.phase_chart(f"Phases of a step, {run.name}", phases)
            for run, phases, _ in _breakdowns(report)
        ]
        + series.step_chart(report),
        "losses": series.loss_chart(report),
    }
    return {
        **({name: [] for name in drawn} if reason else drawn),
        "why_no_charts": reason,
        "chart": charts,
    }


def _verdict(report: Report) -> str:
    failed = len(report.runs) - len(report.complete)
    if failed:
        return f"{failed} of {len(report.runs)} runs failed"
    return "Losses differ" if report.loss_difference else "Every run succeeded"


def _headlines(report: Report) -> list[tuple[str, list[Value]]]:
    """Return title and values of the figures on top."""
    by_key = {figure.key: figure for figure in figures(report.baseline_bytes)}
    found = []
    for keys in HEADLINES:
        known = ((by_key[key].title, _values(report, by_key[key])) for key in keys)
        found += [(title, values) for title, values in known if values][:1]
    return found


def _values(report: Report, figure: Figure) -> list[Value]:
    columns = report.columns
    spreads = {name: figure.of_runs(runs) for name, runs in columns.items()}
    known = {name: spread for name, spread in spreads.items() if spread is not None}
    if not any(spread.median for spread in known.values()):
        return []
    first = next(iter(columns))
    return [
        Value(
            name=name,
            text=figure.form(spread.median),
            detail=figure.show_range(spread) if len(columns[name]) > 1 else "",
            change=""
            if name == first
            else figure.change(columns[name], report.reference).strip("()"),
        )
        for name, spread in known.items()
    ]


def _loss_rows(report: Report) -> list[tuple[int, list[str], bool]]:
    """Return number and digits of the first losses, and whether all runs printed the same ones."""
    losses = [run.losses for run in report.complete]
    rows = []
    for index in range(min(LOSS_ROWS_MAX, max(map(len, losses), default=0))):
        printed = [each[index] if index < len(each) else UNKNOWN for each in losses]
        rows.append((index, printed, len(set(printed)) == 1))
    return rows


def _breakdowns(report: Report) -> list[tuple[Run, list[PhaseTime], float]]:
    """Return the phases of a step of each column that has them, and their sum."""
    found = []
    for run in _recorded(report):
        phases = phase_times(run.recording.marks)
        if phases:
            found.append((run, phases, sum(phase.total_s for phase in phases)))
    return found


def _recorded(report: Report) -> list[Run]:
    """Return the first run of each column that left marks."""
    firsts = (
        next((run for run in runs if run.recording.marks), None) for runs in report.columns.values()
    )
    return [run for run in firsts if run is not None]


def _settings(report: Report) -> list[tuple[str, list[str], bool]]:
    """Return each setting with its value in every column, and whether these differ."""
    columns = [runs[0].column for runs in report.columns.values()]
    names = dict.fromkeys(name for column in columns for name in column.environment)
    rows = [[column.environment.get(name, "") for column in columns] for name in names]
    if "memascend" in report.config:
        block = json.dumps(report.config["memascend"])
        titles = [*names, '"memascend" in the JSON']
        is_off = [DISABLE_VARIABLE in column.environment for column in columns]
        rows.append(["not looked at" if off else block for off in is_off])
    else:
        titles = list(names)
    return [
        (title, values, len(set(values)) > 1) for title, values in zip(titles, rows, strict=True)
    ]
