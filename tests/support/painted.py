"""Charts as matplotlib has them, before they become a picture."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.base.charts import Chart


def painted(chart: Chart | None) -> Any:
    """Return the axes of a chart; skip where matplotlib is missing."""
    figures = pytest.importorskip("matplotlib.figure")
    assert chart is not None
    axes = figures.Figure().subplots()
    chart.paint(axes)
    return axes


def legend_of(axes: Any) -> list[str]:
    """Return the texts of the legend."""
    return [text.get_text() for text in axes.figure.legends[0].get_texts()]


def points_of(line: Any) -> list[tuple[float, float]]:
    """Return the points of a line."""
    return [(float(x), float(y)) for x, y in line.get_xydata()]
