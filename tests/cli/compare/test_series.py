"""What is drawn of which run: memory, components, drives, steps, losses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memascend.base.units import MIB
from memascend.cli.compare import series
from memascend.cli.compare.steps import phase_times
from memascend.ledger.trace import SETUP, Mark, Measures, Recording
from memascend.system.processes import DriveSample
from tests.support.comparisons import make_comparison, make_marks, make_report, make_run
from tests.support.painted import legend_of, painted, points_of


def test_memory_has_a_line_for_each_run_and_colours_by_column() -> None:
    charts = series.memory_charts(make_comparison(repeat=2))
    resident, locked = charts
    for chart in charts:
        lines = painted(chart).lines
        assert [each.get_alpha() for each in lines] == [1, 0.4, 1, 0.4]
        first, second, third, fourth = (each.get_color() for each in lines)
        assert first == second != third == fourth
    assert "above a process that has only imported" in resident.title
    assert "memascend: at most 89.00 MiB" in resident.description
    assert "stock: at most 1.00 MiB" in locked.description


def test_memory_is_drawn_whole_where_no_baseline_was_measured() -> None:
    [resident, _] = series.memory_charts(make_report(make_run("stock")))
    assert resident.title == "Resident memory"
    assert "200.00 MiB" in resident.description


def test_components_are_those_of_who_has_them_the_largest_at_the_bottom() -> None:
    [chart] = series.component_charts(make_comparison())
    axes = painted(chart)
    assert legend_of(axes) == ["staging slots", "optimizer tiles"]
    assert axes.get_xlim()[0] == 0  # of the run, not of the trace
    assert series.component_charts(make_report(make_run("stock"))) == []


def test_many_components_end_in_one_for_the_others() -> None:
    components = {f"part {number}": (11 + number) * MIB for number in range(10)}
    marks = [Mark(time_s, SETUP, Measures(components=components)) for time_s in (1.0, 2.0)]
    [chart] = series.component_charts(
        make_report(make_run("memascend", recording=Recording(marks)))
    )
    assert legend_of(painted(chart)) == [*(f"part {n}" for n in range(9, 2, -1)), "others"]
    assert "others: at most 36.00 MiB" in chart.description


def test_long_runs_are_drawn_by_what_changes() -> None:
    few, many = (Measures(components={"slots": size * MIB}) for size in (1, 2))
    marks = [Mark(float(second), SETUP, few) for second in range(500)]
    marks += [Mark(float(second), SETUP, many) for second in range(500, 1000)]
    [chart] = series.component_charts(
        make_report(make_run("memascend", recording=Recording(marks)))
    )
    [area] = painted(chart).collections
    corners = area.get_paths()[0].vertices.tolist()
    assert len(corners) < 20
    assert [500.0, 2.0] in corners


def test_phases_are_bars_of_computing_and_waits() -> None:
    phases = phase_times(make_marks())
    chart = series.phase_chart("Phases of a step", phases)
    axes = painted(chart)
    assert legend_of(axes)[:2] == ["computing", "waiting for the drive"]
    assert (
        chart.description == "forward: 2.00 s; backward: 4.00 s; optimizer: 3.00 s; other: 1.00 s"
    )
    heights = [bar.get_height() for bar in axes.patches]
    assert heights[:8] == [1, 4, 2, 0.5, 1, 0, 0, 0]  # computing, then the drive


def test_drives_are_drawn_as_rates_one_chart_for_each_way() -> None:
    charts = series.drive_charts(make_comparison())
    assert [chart.title for chart in charts] == [
        "Drive nvme0n1: read per second",
        "Drive nvme0n1: written per second",
    ]
    read, written = charts
    assert "stock: at most 4.00 MiB/s" in read.description
    assert "memascend: at most 148.00 MiB/s" in written.description


def test_a_drive_that_is_not_always_there_is_drawn_where_it_is() -> None:
    counters = SimpleNamespace(read_bytes=MIB, write_bytes=MIB)
    samples = [
        DriveSample(0.0, {}),
        DriveSample(1.0, {"sda": counters}),
        DriveSample(1.0, {"sda": counters}),
        DriveSample(2.0, {"sda": SimpleNamespace(read_bytes=3 * MIB, write_bytes=MIB)}),
    ]
    charts = series.drive_charts(make_report(make_run("stock", drive_samples=samples)))
    assert "2.00 MiB/s" in charts[0].description
    assert series.drive_charts(make_report(make_run("stock"))) == []


def test_steps_are_counted_as_losses_are() -> None:
    report = make_report(make_run("stock", "4.0", "3.5", "3.0"))
    [steps], [losses] = series.step_chart(report), series.loss_chart(report)
    assert points_of(painted(steps).lines[0]) == [(1, 2), (2, 2)]  # no loss before the first
    assert points_of(painted(losses).lines[0]) == [(0, 4), (1, 3.5), (2, 3)]
    assert "stock: at most 2 s" in steps.description


@pytest.mark.parametrize("losses", [(), ("nan",), ("nan", "inf")])
def test_losses_that_are_no_numbers_are_not_drawn(losses: tuple[str, ...]) -> None:
    assert series.loss_chart(make_report(make_run("stock", *losses))) == []
