"""The geometry of charts: ticks, lines, areas, and what they say of themselves."""

from __future__ import annotations

import math
import re

import pytest

from memascend.base.units import GIB, MIB, format_nbytes
from memascend.cli.compare.charts import (
    POINTS_MAX,
    SIDE,
    TICKS_MAX,
    Axis,
    Chart,
    Point,
    Series,
    area_chart,
    line_chart,
    thinned,
    ticks,
)
from memascend.cli.compare.figures import format_seconds


def line(name: str, *points: Point, muted: bool = False) -> Series:
    return Series(name, f"column-{name}", points, muted)


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


def corners(path: str) -> list[tuple[float, ...]]:
    """The points of a path."""
    return [tuple(map(float, part.split())) for part in re.split("[MLZ]", path) if part]


@pytest.mark.parametrize(
    ("low", "high", "base", "expected"),
    [
        (0, 10, 10, [0, 2, 4, 6, 8, 10]),
        (0, 0.9, 10, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (4.4, 9.2, 10, [4, 5, 6, 7, 8, 9, 10]),
        (0, 2.61 * GIB, 1024, [part * GIB / 2 for part in range(7)]),
        (0, 130 * MIB, 1024, [part * 32 * MIB for part in range(6)]),
        (0, 0, 10, [0, 0.2, 0.4, 0.6, 0.8, 1.0][:2]),
        (3, 3, 10, [3, 3.5]),
    ],
)
def test_ticks_are_round_and_hold_all_values(
    low: float, high: float, base: float, expected: list[float]
) -> None:
    found = ticks(low, high, base)
    assert found == pytest.approx(expected)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= TICKS_MAX + 2


def test_a_line_goes_from_corner_to_corner_of_its_ticks() -> None:
    chart = drawn(line_chart("t", [line("a", (0, 0), (5, 5), (10, 10))], form=format_seconds))
    assert corners(chart.shapes[0].path) == [(0, SIDE), (SIDE / 2, SIDE / 2), (SIDE, 0)]
    assert [tick.label for tick in chart.y_ticks] == ["0 s", "2 s", "4 s", "6 s", "8 s", "10 s"]
    assert [tick.percent for tick in chart.y_ticks] == pytest.approx([0, 20, 40, 60, 80, 100])
    assert [(tick.percent, tick.label) for tick in chart.x_ticks][:2] == [(0, "0"), (20, "2")]


def test_lines_share_one_plane_and_what_has_no_points_is_left_out() -> None:
    chart = drawn(
        line_chart("t", [line("a", (0, 10)), line("b"), line("c", (10, 5))], form=format_seconds)
    )
    assert [shape.name for shape in chart.shapes] == ["a", "c"]
    assert corners(chart.shapes[0].path) == [(0, 0), (0, 0)]  # a dot
    assert corners(chart.shapes[1].path) == [(SIDE, SIDE / 2)] * 2
    assert line_chart("t", [line("b")], form=format_seconds) is None
    assert line_chart("t", [], form=format_seconds) is None


def test_a_single_moment_has_a_place() -> None:
    chart = drawn(line_chart("t", [line("a", (0, 0))], form=format_seconds))
    assert corners(chart.shapes[0].path) == [(0, SIDE)] * 2
    assert chart.x_ticks[0].percent == 0


def test_a_chart_says_in_words_what_it_shows() -> None:
    series = [line("stock", (0, GIB), (1, 2 * GIB)), line("ours", (0, MIB))]
    chart = drawn(line_chart("t", series, form=format_nbytes, base=1024))
    assert chart.description == "stock: at most 2.00 GiB; ours: at most 1.00 MiB"
    assert [tick.label for tick in chart.y_ticks] == ["0 B", "512 MiB", "1 GiB", "1.5 GiB", "2 GiB"]


def test_faint_lines_are_drawn_and_not_in_the_legend() -> None:
    chart = drawn(
        line_chart("t", [line("a", (0, 1)), line("a", (0, 2), muted=True)], form=format_seconds)
    )
    assert [shape.is_muted for shape in chart.shapes] == [False, True]
    assert [shape.label for shape in chart.legend] == ["a: at most 1.00 s"]


def test_time_begins_at_zero_and_steps_where_they_begin_with_whole_numbers() -> None:
    series = [line("a", (1, 0), (3, 10))]
    over_time = drawn(line_chart("t", series, form=format_seconds))
    assert (over_time.x_ticks[0].percent, over_time.x_ticks[0].label) == (0, "0")
    assert corners(over_time.shapes[0].path)[0] == pytest.approx((SIDE / 3, SIDE), abs=0.1)
    steps = Axis("step", from_zero=False, is_whole=True)
    chart = drawn(line_chart("t", series, form=format_seconds, x_axis=steps))
    assert [(tick.percent, tick.label) for tick in chart.x_ticks] == [
        (0, "1"),
        (50, "2"),
        (100, "3"),
    ]
    assert chart.x_title == "step"
    assert [tick.label for tick in over_time.x_ticks][1] == "0.5"


def test_losses_need_not_begin_at_zero() -> None:
    series = [line("a", (1, 9.2), (2, 4.4))]
    near = drawn(line_chart("t", series, form="{:g}".format, from_zero=False))
    assert [tick.label for tick in near.y_ticks] == ["4", "5", "6", "7", "8", "9", "10"]
    assert drawn(line_chart("t", series, form="{:g}".format)).y_ticks[0].label == "0"


def test_areas_stand_on_each_other_and_hold_their_value_until_the_next() -> None:
    low, high = line("low", (0, 4), (1, 2)), line("high", (0, 1), (1, 6))
    chart = drawn(area_chart("t", [low, high], form=format_seconds))
    assert chart.is_stacked
    assert [shape.name for shape in chart.legend] == ["high", "low"]
    floor, top = (corners(shape.path) for shape in chart.shapes)
    assert floor[:4] == [(0, 500), (SIDE, 500), (SIDE, 750), (SIDE, 750)]
    assert [y for _, y in top[:4]] == [375, 375, 0, 0]
    assert top[4:] == floor[:4][::-1]  # its lower edge is the upper one below


def test_nothing_is_stacked_of_nothing() -> None:
    assert area_chart("t", [line("a", (0, 0))], form=format_seconds) is None
    assert area_chart("t", [], form=format_seconds) is None


def test_long_series_become_short_and_keep_their_peaks() -> None:
    points = [(float(index), math.sin(index / 50)) for index in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7777] = (7777.0, -99.0)
    found = thinned(points)
    assert len(found) <= POINTS_MAX
    assert {(4321.0, 99.0), (7777.0, -99.0)} <= set(found)
    assert found == sorted(found)
    assert thinned(points[:POINTS_MAX]) == points[:POINTS_MAX]
