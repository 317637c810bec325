"""What is drawn of which run: memory, components, drives, steps, losses."""

from __future__ import annotations

import pytest

from memascend.base.units import MIB
from memascend.cli.compare import series
from memascend.cli.compare.charts import Chart
from memascend.ledger.trace import SETUP, Mark, Measures, Recording
from memascend.system.drive_counters import DriveCounters
from memascend.system.processes import DriveSample
from tests.support.comparisons import make_comparison, make_report, make_run


def names(charts: list[Chart]) -> list[list[str]]:
    return [[shape.name for shape in chart.shapes] for chart in charts]


def test_memory_has_a_line_for_each_run_and_colours_by_column() -> None:
    report = make_comparison(repeat=2)
    charts = series.memory_charts(report)
    assert names(charts) == [["stock", "stock", "memascend", "memascend"]] * 2
    resident, locked = charts
    assert [shape.style for shape in resident.shapes][1:3] == ["column-stock", "column-memascend"]
    assert [shape.is_muted for shape in resident.shapes] == [False, True, False, True]
    assert "above a process that has only imported" in resident.title
    assert "memascend: at most 89.00 MiB" in resident.description
    assert "stock: at most 1.00 MiB" in locked.description


def test_memory_is_drawn_whole_where_no_baseline_was_measured() -> None:
    [resident, _] = series.memory_charts(make_report(make_run("stock")))
    assert resident.title == "Resident memory"
    assert "200.00 MiB" in resident.description


def test_components_are_those_of_who_has_them_the_largest_at_the_bottom() -> None:
    [chart] = series.component_charts(make_comparison())
    assert chart.is_stacked
    assert [shape.name for shape in chart.shapes] == ["staging slots", "optimizer tiles"]
    assert chart.x_ticks[0].label == "0"  # of the run, not of the trace
    assert series.component_charts(make_report(make_run("stock"))) == []


def test_many_components_end_in_one_for_the_others() -> None:
    components = {f"part {number}": (20 - number) * MIB for number in range(10)}
    marks = [Mark(time_s, SETUP, Measures(components=components)) for time_s in (1.0, 2.0)]
    [chart] = series.component_charts(
        make_report(make_run("memascend", recording=Recording(marks)))
    )
    assert len(chart.shapes) == series.SHADE_COUNT
    assert chart.shapes[-1].name == "others"
    assert "others: at most 36.00 MiB" in chart.description
    assert [shape.style for shape in chart.shapes] == [
        f"shade-{index}" for index in range(series.SHADE_COUNT)
    ]


def test_long_runs_are_drawn_by_what_changes() -> None:
    few, many = (Measures(components={"slots": size * MIB}) for size in (1, 2))
    marks = [Mark(float(second), SETUP, few) for second in range(500)]
    marks += [Mark(float(second), SETUP, many) for second in range(500, 1000)]
    [chart] = series.component_charts(
        make_report(make_run("memascend", recording=Recording(marks)))
    )
    [shape] = chart.shapes
    assert shape.path.count("L") < 20
    assert "500.5 " in shape.path  # 500 of 999 seconds


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
    counters = DriveCounters(MIB, MIB, 0.0)
    samples = [
        DriveSample(0.0, {}),
        DriveSample(1.0, {"sda": counters}),
        DriveSample(1.0, {"sda": counters}),
        DriveSample(2.0, {"sda": DriveCounters(3 * MIB, MIB, 0.0)}),
    ]
    charts = series.drive_charts(make_report(make_run("stock", drive_samples=samples)))
    assert "2.00 MiB/s" in charts[0].description
    assert series.drive_charts(make_report(make_run("stock"))) == []


def test_steps_are_counted_as_losses_are() -> None:
    report = make_report(make_run("stock", "4.0", "3.5", "3.0"))
    [steps], [losses] = series.step_chart(report), series.loss_chart(report)
    assert steps.x_ticks[0].label == "1"  # no loss before the first
    assert [losses.x_ticks[0].label, losses.x_ticks[-1].label] == ["0", "2"]
    assert "2.00 s" in steps.description


@pytest.mark.parametrize("losses", [(), ("nan",), ("nan", "inf")])
def test_losses_that_are_no_numbers_are_not_drawn(losses: tuple[str, ...]) -> None:
    assert series.loss_chart(make_report(make_run("stock", *losses))) == []
