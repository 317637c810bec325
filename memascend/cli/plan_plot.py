"""The picture of `memascend plan --plot`: host memory by component, one bar for each account."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memascend.base.charts import Quantity, bar_chart
from memascend.cli.shared.picture import check_picture, write_picture
from memascend.plan.footprint import Footprint


def plot(columns: Mapping[str, Footprint], model: str, path: Path) -> None:
    """Write the picture, in the format of the path's suffix.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    check_picture(path)
    plans = columns.values()
    names = dict.fromkeys(name for plan in plans for name in plan.host)
    chart = bar_chart(
        model,
        Quantity("host memory of one rank", "B"),
        {name: [plan.host.get(name, 0) for plan in plans] for name in names},
        bars=list(columns),
        peaks=[plan.peak_bytes for plan in plans],
    )
    write_picture(chart, path)
