"""Every chart that a command writes, drawn by matplotlib.

matplotlib is optional: this file alone imports it, and only to draw. Charts know numbers and names;
nothing of runs, plans or pages.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memascend.base.units import format_nbytes, parse_nbytes

Point = tuple[float, float]

#: Width and height of a chart; text has 13 of the same units.
WIDTH, HEIGHT = 400, 300
#: The first that places legends outside the axes; the extra `plot` asks for it as well.
_VERSION_MIN = (3, 7)
_UNITS_PER_INCH = 72
_TICKS_MAX = 6
#: Parts below this share of the highest sum are not shown by themselves.
_SHARE_MIN = 1e-3

_STYLE = {
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 13,
    "legend.borderpad": 0,
    "legend.columnspacing": 1,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.title_fontsize": 16,
    # Samples of hours on a few hundred pixels: lines keep their peaks and lose the rest.
    "path.simplify_threshold": 0.5,
    "svg.hashsalt": "memascend",
    "text.parse_math": False,  # "$" in a name is a dollar sign
}


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of a chart: of its background, its text, its lines, and of series in their order."""

    paper: str
    ink: str
    grid: str
    series: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """Return matplotlib's settings."""
        from cycler import cycler

        ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        return {
            **dict.fromkeys(ink, self.ink),
            "figure.facecolor": self.paper,
            "axes.facecolor": self.paper,
            "grid.color": self.grid,
            "axes.prop_cycle": cycler(color=self.series),
        }


LIGHT = Palette(
    "#ffffff",
    "#1c2128",
    "#d8dee4",
    ("#b35900", "#0969da", "#7a45c4", "#1a7f37", "#cf222e", "#0a7ea4", "#bf3989", "#6e7781"),
)
DARK = Palette(
    "#161b22",
    "#e6edf3",
    "#30363d",
    ("#f0a35e", "#58a6ff", "#c297ff", "#3fb950", "#ff7b72", "#39c5cf", "#f778ba", "#8b949e"),
)


@dataclass(frozen=True, slots=True)
class Series:
    """Values by name."""

    name: str  # its name in the legend
    points: Sequence[Point]  # points in the order of x
    colour: int = 0  # index of its colour
    is_faint: bool = False  # whether it is one of several of its kind: faint, and not in the legend

    @property
    def peak(self) -> float:
        """The highest value."""
        return max(y for _, y in self.points)


@dataclass(frozen=True, slots=True)
class Quantity:
    """The quantity on the y axis."""

    name: str  # its name; the axis adds the unit
    unit: str = ""  # unit of the values; "B" and "B/s" become KiB, MiB or GiB
    from_zero: bool = True  # whether the axis begins at 0

    def form(self, value: float) -> str:
        """Return a value with its unit."""
        if self.unit.startswith("B"):
            return format_nbytes(value) + self.unit[1:]
        return f"{value:.4g} {self.unit}".rstrip()

    def axis(self, peak: float) -> tuple[float, str]:
        """Return the number that values are divided by, and the title of the axis."""
        divisor, unit = 1, self.unit
        if unit.startswith("B"):
            name = format_nbytes(peak).partition(" ")[2]
            divisor, unit = parse_nbytes(f"1{name}"), name + unit[1:]
        return divisor, f"{self.name}, {unit}" if unit else self.name


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that can be drawn in any colours."""

    title: str
    description: str  # its content in words, for readers who cannot see it
    paint: Callable[[Any], None]  # draws it on matplotlib's axes

    def picture(
        self, *, palette: Palette = LIGHT, file_format: str | None = "svg", is_alone: bool = False
    ) -> bytes:
        """Return the picture as the content of a file, in one of matplotlib's formats.

        A picture that stands alone is larger, and has its title.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: matplotlib cannot write this format.
        """
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # not the user's own settings
            matplotlib.rcParams.update(_STYLE | palette.settings())
            scale = (1.5 if is_alone else 1) / _UNITS_PER_INCH
            figure = Figure(figsize=(WIDTH * scale, HEIGHT * scale))
            axes = figure.subplots()
            self.paint(axes)
            if is_alone:
                figure.legends[0].set(title=self.title, alignment="left")
            content = io.BytesIO()
            metadata = {"Date": None} if file_format == "svg" else None
            figure.savefig(content, format=file_format, dpi=150, metadata=metadata)
        return content.getvalue()


def why_none() -> str:
    """Return why no chart can be drawn, and the remedy; empty if matplotlib is there."""
    fix = "fix: pip install 'memascend[plot]'"
    try:
        import matplotlib.figure
    except ImportError as error:
        return f"matplotlib cannot be imported: {error}. {fix}"
    version = getattr(matplotlib, "__version_info__", (0,))[:2]
    if version < _VERSION_MIN:
        needed = ".".join(map(str, _VERSION_MIN))
        return f"matplotlib {matplotlib.__version__} is too old, {needed} is needed. {fix}"
    return ""


def line_chart(
    title: str,
    quantity: Quantity,
    series: Sequence[Series],
    *,
    by_step: bool = False,
    is_overlaid: bool = False,
    x_title: str = "",
) -> Chart | None:
    """Return a chart of one line for each series with points; None when there is nothing to draw.

    x counts steps, or seconds since the start, or the quantity of `x_title`. A line that later ones
    may hide is drawn broad.
    """
    drawn = [each for each in series if each.points]
    if not drawn:
        return None
    divisor, y_title = quantity.axis(max(each.peak for each in drawn))
    labels = [f"{each.name}: at most {quantity.form(each.peak)}" for each in drawn]
    named = [label for each, label in zip(drawn, labels, strict=True) if not each.is_faint]

    def paint(axes: Any) -> None:
        for each, label in zip(drawn, labels, strict=True):
            is_broad = is_overlaid and each is drawn[0]
            axes.plot(
                [x for x, _ in each.points],
                [y / divisor for _, y in each.points],
                color=f"C{each.colour}",
                alpha=0.4 if each.is_faint or is_broad else 1,
                linewidth=7 if is_broad else 1 if each.is_faint else 2,
                marker="o" if len(each.points) == 1 else None,
                label=None if each.is_faint else label,
            )
        _finish_plane(axes, by_step=by_step, x_title=x_title)
        axes.set_ylabel(y_title)
        if quantity.from_zero:
            axes.set_ylim(bottom=0)
        _add_legend(axes, column_count=1)

    return Chart(title, "; ".join(named), paint)


def area_chart(
    title: str, quantity: Quantity, xs: Sequence[float], parts: Mapping[str, Sequence[float]]
) -> Chart | None:
    """Return a chart of areas over time, on top of each other; None when there is nothing to draw.

    `parts` has the values of each area at each x, the lowest area first; `xs` are seconds since the
    start. A value holds until the next x.
    """
    if not any(_sums(parts)):
        return None
    parts = _distinct(parts)
    divisor, y_title = quantity.axis(max(_sums(parts)))

    def paint(axes: Any) -> None:
        heights = [[value / divisor for value in values] for values in parts.values()]
        colours = [f"C{index}" for index in range(len(parts))]
        axes.stackplot(xs, heights, labels=list(parts), colors=colours, step="post")
        _finish_plane(axes, by_step=False)
        axes.set_ylabel(y_title)
        _add_legend(axes, column_count=2)

    named = [f"{name}: at most {quantity.form(max(values))}" for name, values in parts.items()]
    return Chart(title, "; ".join(named), paint)


def bar_chart(
    title: str,
    quantity: Quantity,
    parts: Mapping[str, Sequence[float]],
    *,
    bars: Sequence[str],
    peaks: Sequence[float] = (),
) -> Chart:
    """Return a chart of bars, each divided into the same parts, the lowest part first.

    `peaks` are values above each bar, reached for a while.
    """
    parts, sums = _distinct(parts), _sums(parts)
    divisor, y_title = quantity.axis(max([*sums, *peaks]))
    tops = list(peaks) or sums
    texts = [
        f"{height / divisor:.2f}" + (f" (peak {top / divisor:.2f})" if top > height else "")
        for height, top in zip(sums, tops, strict=True)
    ]

    def paint(axes: Any) -> None:
        floor = [0.0] * len(bars)
        for name, values in parts.items():
            heights = [value / divisor for value in values]
            axes.bar(list(bars), heights, bottom=floor, label=name)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        for index, (top, text) in enumerate(zip(tops, texts, strict=True)):
            if peaks:
                ink = axes.yaxis.label.get_color()
                axes.plot([index - 0.4, index + 0.4], [top / divisor] * 2, ":", color=ink)
            axes.text(index, top / divisor, text, ha="center", va="bottom", fontsize=12)
        axes.use_sticky_edges = False  # room for the texts, above parts of height 0 too
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(y_title)
        axes.locator_params(axis="y", nbins=_TICKS_MAX)
        _add_legend(axes, column_count=2)

    unit = y_title.rpartition(", ")[2]
    described = [f"{bar}: {text} {unit}" for bar, text in zip(bars, texts, strict=True)]
    return Chart(title, "; ".join(described), paint)


def _distinct(parts: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """Return the parts that can be told apart, and the sum of all smaller ones as "others"."""
    peaks = {name: max(values) for name, values in parts.items()}
    least = _SHARE_MIN * max(_sums(parts), default=0)
    ranked = sorted(peaks, key=lambda name: -peaks[name])[: len(LIGHT.series) - 1]
    named = {name: parts[name] for name in parts if name in ranked and peaks[name] >= least}
    rest = {name: parts[name] for name in parts if name not in named and peaks[name] > 0}
    return {**named, **({"others": _sums(rest)} if rest else {})}


def _sums(parts: Mapping[str, Sequence[float]]) -> list[float]:
    return [sum(values) for values in zip(*parts.values(), strict=True)]


def _finish_plane(axes: Any, *, by_step: bool, x_title: str = "") -> None:
    axes.margins(x=0)
    axes.locator_params(nbins=_TICKS_MAX)
    axes.locator_params(axis="x", integer=by_step)
    axes.set_xlabel(x_title or ("step" if by_step else "seconds since the start"))
    if not by_step:
        axes.set_xlim(left=min(0, axes.get_xlim()[0]))


def _add_legend(axes: Any, *, column_count: int) -> None:
    axes.figure.legend(loc="outside upper left", ncols=column_count)
