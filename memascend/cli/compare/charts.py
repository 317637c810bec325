"""Turns values into the lines, areas and ticks of a chart, in a square of side SIDE.

Pure geometry; knows neither runs nor HTML. Labels stand beside the drawing, at percentages, so that
the drawing may be stretched to any width and the text keeps its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Side of the square in which everything is drawn, x to the right, y downwards.
SIDE = 1000
#: Points of one line: more cannot be told apart on a screen.
POINTS_MAX = 400
TICKS_MAX = 6

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Values by name.

    Attributes:
        name: As the legend has it.
        style: Class of the style sheet, which gives the colour.
        points: In the order of x.
        is_muted: Drawn faintly, as one of several of its kind.
    """

    name: str
    style: str
    points: Sequence[Point]
    is_muted: bool = False

    @property
    def peak(self) -> Point:
        """The first of its highest points."""
        return max(self.points, key=lambda point: point[1])


@dataclass(frozen=True, slots=True)
class Shape:
    """A line or an area as drawn.

    Attributes:
        path: SVG path data.
        label: Text shown when the pointer is on it.
    """

    name: str
    style: str
    path: str
    label: str
    is_muted: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark of an axis, at so many percent of its length."""

    percent: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything that a template draws.

    Attributes:
        description: In words, for who cannot see it.
        is_stacked: Areas instead of lines.
    """

    title: str
    description: str
    shapes: Sequence[Shape]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_title: str
    is_stacked: bool = False

    @property
    def legend(self) -> list[Shape]:
        """One shape of each name, the topmost area first."""
        found = list({shape.name: shape for shape in self.shapes if not shape.is_muted}.values())
        return found[::-1] if self.is_stacked else found


Form = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """The quantity on the x axis.

    Attributes:
        from_zero: Whether it begins at 0; else at the first value.
        is_whole: Whether only whole numbers mean something.
    """

    title: str
    from_zero: bool = True
    is_whole: bool = False


TIME = Axis("seconds since the start")


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    form: Form,
    base: float = 10,
    from_zero: bool = True,
    x_axis: Axis = TIME,
) -> Chart | None:
    """Return a chart of one line for each series; None when there is nothing to draw.

    Args:
        title: Title of the chart.
        series: Values; series without points are left out.
        form: Shows a value of y.
        base: Ticks are round numbers of its powers.
        from_zero: Whether y begins at 0.
        x_axis: The quantity on the x axis.
    """
    drawn = [each for each in series if each.points]
    if not drawn:
        return None
    values = [y for each in drawn for _, y in each.points]
    y_ticks = ticks(0.0 if from_zero else min(values), max(values), base)
    plane = _Plane(drawn, y_ticks, x_axis)
    shapes = [
        Shape(
            each.name,
            each.style,
            plane.line(thinned(each.points)),
            f"{each.name}: at most {form(each.peak[1])}",
            each.is_muted,
        )
        for each in drawn
    ]
    return plane.chart(title, shapes, form, is_stacked=False)


def area_chart(
    title: str,
    series: Sequence[Series],
    *,
    form: Form,
    base: float = 10,
) -> Chart | None:
    """Return a chart of areas over time, on top of each other, the first one at the bottom.

    All series have the same x; values hold from their point to the next one.
    """
    drawn = [each for each in series if any(y for _, y in each.points)]
    if not drawn:
        return None
    xs = [x for x, _ in drawn[0].points]
    floor = [0.0] * len(xs)
    bands = []
    for each in drawn:
        top = [below + y for below, (_, y) in zip(floor, each.points, strict=True)]
        bands.append((each, floor, top))
        floor = top
    plane = _Plane(drawn, ticks(0.0, max(floor), base), TIME)
    shapes = [
        Shape(
            each.name,
            each.style,
            plane.band(xs, low, high),
            f"{each.name}: at most {form(each.peak[1])}",
        )
        for each, low, high in bands
    ]
    return plane.chart(title, shapes, form, is_stacked=True)


def ticks(low: float, high: float, base: float = 10) -> list[float]:
    """Return a few round numbers from at most `low` to at least `high`."""
    span = high - low or abs(high) or 1.0
    unit = base ** math.floor(math.log(span / TICKS_MAX, base))
    steps = (1, 2, 5, 10) if base == 10 else tuple(2**power for power in range(11))
    step = next(unit * part for part in steps if span / (unit * part) <= TICKS_MAX)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most about POINTS_MAX of them, with every peak and valley."""
    if len(points) <= POINTS_MAX:
        return list(points)
    size = math.ceil(2 * len(points) / POINTS_MAX)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        chunk = points[start : start + size]
        extremes = {
            min(range(len(chunk)), key=lambda index: chunk[index][1]),
            max(range(len(chunk)), key=lambda index: chunk[index][1]),
        }
        kept += [chunk[index] for index in sorted(extremes)]
    return kept


class _Plane:
    """The values that the square shows, and where in it they lie."""

    def __init__(self, series: Sequence[Series], y_ticks: Sequence[float], x_axis: Axis) -> None:
        self._y_ticks, self._x_axis = y_ticks, x_axis
        self._left = min(each.points[0][0] for each in series)
        if x_axis.from_zero:
            self._left = min(0.0, self._left)
        self._right = max(each.points[-1][0] for each in series)
        if self._right == self._left:
            self._right += 1.0

    def line(self, points: Sequence[Point]) -> str:
        placed = [self._place(*point) for point in points]
        if len(placed) == 1:  # a line of no length is drawn as a dot
            placed *= 2
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)

    def band(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str:
        above = _stairs(xs, high, self._right)
        below = _stairs(xs, low, self._right)[::-1]
        return self.line([*above, *below]) + "Z"

    def chart(self, title: str, shapes: Sequence[Shape], form: Form, *, is_stacked: bool) -> Chart:
        return Chart(
            title=title,
            description="; ".join(shape.label for shape in shapes if not shape.is_muted),
            shapes=shapes,
            x_ticks=[Tick(self._place(x, 0)[0] / SIDE * 100, f"{x:g}") for x in self._x_values()],
            y_ticks=[
                Tick(100 - self._place(self._left, y)[1] / SIDE * 100, _short(form(y)))
                for y in self._y_ticks
            ],
            x_title=self._x_axis.title,
            is_stacked=is_stacked,
        )

    def _x_values(self) -> list[float]:
        return [
            x
            for x in ticks(self._left, self._right)
            if self._left <= x <= self._right
            if not self._x_axis.is_whole or x == round(x)
        ]

    def _place(self, x: float, y: float) -> Point:
        bottom, top = self._y_ticks[0], self._y_ticks[-1]
        return (
            (x - self._left) / (self._right - self._left) * SIDE,
            (top - y) / (top - bottom) * SIDE,
        )


def _short(text: str) -> str:
    """Return "1.5 GiB" for "1.50 GiB"."""
    return re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", text).replace(". ", " ").rstrip(".")


def _stairs(xs: Sequence[float], ys: Sequence[float], right: float) -> list[Point]:
    ends = [*xs[1:], right]
    return [point for x, end, y in zip(xs, ends, ys, strict=True) for point in ((x, y), (end, y))]
