"""Charts: what is drawn of which values, in which unit, and what they say of themselves."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from memascend.base.charts import (
    DARK,
    HEIGHT,
    LIGHT,
    Point,
    Quantity,
    Series,
    area_chart,
    bar_chart,
    line_chart,
    why_none,
)
from memascend.base.units import GIB, MIB
from tests.support.painted import legend_of, painted, points_of

SECONDS = Quantity("time", "s")
BYTES = Quantity("memory", "B")


def line(name: str, *points: Point, is_faint: bool = False) -> Series:
    return Series(name, points, is_faint=is_faint)


@pytest.mark.parametrize(
    ("quantity", "peak", "title", "form"),
    [
        (BYTES, 2.5 * GIB, "memory, GiB", "2.50 GiB"),
        (BYTES, 130 * MIB, "memory, MiB", "130.00 MiB"),
        (BYTES, 0, "memory, B", "0 B"),
        (Quantity("read", "B/s"), 3 * MIB, "read, MiB/s", "3.00 MiB/s"),
        (SECONDS, 12.3456, "time, s", "12.35 s"),
        (Quantity("loss"), 4.125, "loss", "4.125"),
    ],
)
def test_values_and_axes_have_a_unit(
    quantity: Quantity, peak: float, title: str, form: str
) -> None:
    divisor, found = quantity.axis(peak)
    assert (found, quantity.form(peak)) == (title, form)
    axes = painted(line_chart("t", quantity, [line("a", (0, peak))]))
    assert axes.get_ylabel() == title
    assert points_of(axes.lines[0]) == [(0, peak / divisor)]


def test_a_series_without_points_is_left_out() -> None:
    chart = line_chart("t", SECONDS, [line("a", (0, 10)), line("b"), line("c", (10, 5))])
    axes = painted(chart)
    assert legend_of(axes) == ["a: at most 10 s", "c: at most 5 s"]
    assert line_chart("t", SECONDS, [line("b")]) is None
    assert line_chart("t", SECONDS, []) is None


def test_a_single_point_is_a_dot() -> None:
    axes = painted(line_chart("t", SECONDS, [line("a", (0, 1)), line("b", (0, 1), (1, 2))]))
    assert [each.get_marker() for each in axes.lines] == ["o", "None"]


def test_a_chart_says_in_words_what_it_shows() -> None:
    series = [line("stock", (0, GIB), (1, 2 * GIB)), line("ours", (0, MIB))]
    chart = line_chart("t", BYTES, series)
    assert chart is not None
    assert chart.description == "stock: at most 2.00 GiB; ours: at most 1.00 MiB"


def test_faint_lines_are_drawn_and_not_in_the_legend() -> None:
    axes = painted(line_chart("t", SECONDS, [line("a", (0, 1)), line("a", (0, 2), is_faint=True)]))
    assert [each.get_alpha() for each in axes.lines] == [1, 0.4]
    assert legend_of(axes) == ["a: at most 1 s"]


def test_lines_that_may_hide_the_first_leave_its_edges_to_be_seen() -> None:
    series = [line("a", (0, 1), (1, 1)), line("b", (0, 1), (1, 1))]
    first, second = painted(line_chart("t", SECONDS, series, is_overlaid=True)).lines
    assert first.get_linewidth() > second.get_linewidth()
    assert first.get_alpha() < second.get_alpha()


def test_time_begins_at_zero_and_steps_where_they_begin_with_whole_numbers() -> None:
    series = [line("a", (1, 1), (3, 10))]
    over_time = painted(line_chart("t", SECONDS, series))
    assert over_time.get_xlim() == (0, 3)
    assert over_time.get_xlabel() == "seconds since the start"
    written = painted(line_chart("t", SECONDS, series, x_title="GB written"))
    assert written.get_xlabel() == "GB written"
    axes = painted(line_chart("t", SECONDS, series, by_step=True))
    assert (axes.get_xlim(), axes.get_xlabel()) == ((1, 3), "step")
    assert [*axes.get_xticks()] == [1, 2, 3]


def test_losses_need_not_begin_at_zero() -> None:
    series = [line("a", (1, 9.2), (2, 4.4))]
    assert painted(line_chart("t", SECONDS, series)).get_ylim()[0] == 0
    loss = Quantity("loss", from_zero=False)
    assert 4 < painted(line_chart("t", loss, series)).get_ylim()[0] < 4.4


def test_areas_stand_on_each_other_and_hold_their_value_until_the_next() -> None:
    axes = painted(area_chart("t", SECONDS, [0, 1], {"low": [4, 2], "high": [1, 6]}))
    assert legend_of(axes) == ["low", "high"]
    low, high = (corners(area) for area in axes.collections)
    assert {(0, 0), (0, 4), (1, 4), (1, 2)} <= low
    assert {(0, 4), (0, 5), (1, 5), (1, 8)} <= high
    assert (0, 8) not in high


def corners(area: Any) -> set[tuple[float, float]]:
    """The corners of an area."""
    return {(float(x), float(y)) for path in area.get_paths() for x, y in path.vertices}


def test_nothing_is_stacked_of_nothing() -> None:
    assert area_chart("t", SECONDS, [0], {"a": [0]}) is None
    assert area_chart("t", SECONDS, [], {}) is None


def test_parts_too_many_or_too_small_are_shown_as_others() -> None:
    parts = {f"part {number}": [20.0 - number] for number in range(10)}
    chart = bar_chart("t", SECONDS, parts | {"tiny": [1e-6]}, bars=["a"])
    axes = painted(chart)
    assert legend_of(axes) == [*(f"part {number}" for number in range(7)), "others"]
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    assert tops[-1] == pytest.approx(sum(range(11, 21)))
    assert legend_of(painted(bar_chart("t", SECONDS, {"a": [9.0], "b": [1e-6]}, bars=["x"]))) == [
        "a",
        "others",
    ]
    assert len(LIGHT.series) == len(DARK.series) == 8


def test_bars_have_their_sums_and_peaks_above_them() -> None:
    parts = {"a": [1 * GIB, 2 * GIB], "b": [3 * GIB, 0]}
    chart = bar_chart("t", BYTES, parts, bars=["x", "y"], peaks=[8 * GIB, 2 * GIB])
    axes = painted(chart)
    assert chart.description == "x: 4.00 (peak 8.00) GiB; y: 2.00 GiB"
    assert [text.get_text() for text in axes.texts] == ["4.00 (peak 8.00)", "2.00"]
    assert [points_of(each)[0][1] for each in axes.lines] == [8, 2]
    assert bar_chart("t", SECONDS, {"a": [0.0]}, bars=["x"]).description == "x: 0.00 s"


# -- pictures ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> str:
    pytest.importorskip("matplotlib")
    chart = line_chart("t", SECONDS, [line("a $^$ <b>", (0, 1), (1, 2))])
    assert chart is not None
    return chart.picture(palette=DARK).decode()


def test_a_picture_has_the_colours_of_its_palette(drawn: str) -> None:
    for colour in (DARK.paper, DARK.ink, DARK.grid, DARK.series[0]):
        assert f": {colour}" in drawn, colour
    assert LIGHT.ink not in drawn


def test_names_in_a_picture_are_no_markup(drawn: str) -> None:
    ElementTree.fromstring(drawn)
    assert "a $^$ " in drawn  # as text, not as a formula
    assert "<b>" not in re.sub("<!--.*?-->", "", drawn)


def test_the_users_own_settings_change_no_picture() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    chart = line_chart("t", SECONDS, [line("a", (0, 1), (1, 2))])
    assert chart is not None
    usual = chart.picture()
    with matplotlib.rc_context({"axes.grid": False, "font.size": 30, "axes.facecolor": "red"}):
        assert chart.picture() == usual
        assert matplotlib.rcParams["font.size"] == 30


def test_long_series_become_short_and_keep_their_peaks() -> None:
    pytest.importorskip("matplotlib")
    points = [(float(index), 2 + math.sin(index)) for index in range(100_000)]
    points[43_210] = (43_210.0, 99.0)
    chart = line_chart("t", SECONDS, [Series("a", points)])
    assert chart is not None
    drawing = chart.picture().decode()
    assert len(drawing) < 100_000
    [path] = re.findall(rf'<path d="([^"]*)"[^>]*style="[^"]*{LIGHT.series[0]}', drawing)[-1:]
    heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert 1 <= sum(height < HEIGHT / 2 for height in heights) <= 3  # up to the peak, and down


def test_without_matplotlib_the_reason_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    assert why_none() == ""
    monkeypatch.setattr(matplotlib, "__version_info__", (3, 6, 3))
    monkeypatch.setattr(matplotlib, "__version__", "3.6.3")
    assert re.search(r"3\.6\.3 is too old, 3\.7 is needed.*'memascend\[plot\]'", why_none())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert re.search(
        r"matplotlib cannot be imported: .*pip install 'memascend\[plot\]'", why_none()
    )
