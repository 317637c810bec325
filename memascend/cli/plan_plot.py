"""The picture of `memascend plan --plot`: host memory by component, one bar for each account."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memascend.base.charts import Quantity, bar_chart, why_none
from memascend.errors import ConfigError
from memascend.plan.footprint import Footprint
from memascend.system.files import open_anew


def plot(columns: Mapping[str, Footprint], model: str, path: Path) -> None:
    """Write the picture, in the format of the path's suffix.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    if reason := why_none():
        raise ConfigError(f"--plot {path} cannot be drawn: {reason}")
    plans = columns.values()
    names = dict.fromkeys(name for plan in plans for name in plan.host)
    chart = bar_chart(
        model,
        Quantity("host memory of one rank", "B"),
        {name: [plan.host.get(name, 0) for plan in plans] for name in names},
        bars=list(columns),
        peaks=[plan.peak_bytes for plan in plans],
    )
    try:
        picture = chart.picture(file_format=path.suffix[1:] or None, is_alone=True)
        with open(open_anew(path), "wb") as file:
            file.write(picture)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write --plot {path}: {error}") from error
