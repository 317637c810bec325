"""The picture of `memascend plan --plot`: host memory by component, one bar for each account."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from memascend.base.units import GIB
from memascend.errors import ConfigError
from memascend.plan.footprint import Footprint
from memascend.system.files import open_anew

#: Components below this share of the highest bar are left out.
SHARE_MIN = 1e-3


def plot(columns: Mapping[str, Footprint], model: str, path: Path) -> None:
    """Write the picture, in the format of the path's suffix.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib, which cannot be imported: {error}. pip install "
            "'memascend[plot]'"
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    heights = dict.fromkeys(columns, 0.0)
    highest = max(plan.host_bytes for plan in columns.values())
    for name in dict.fromkeys(name for plan in columns.values() for name in plan.host):
        sizes = [plan.host.get(name, 0) / GIB for plan in columns.values()]
        if max(sizes) * GIB < SHARE_MIN * highest:
            continue
        axes.bar(list(columns), sizes, bottom=list(heights.values()), label=name)
        heights = {title: heights[title] + size for title, size in zip(columns, sizes, strict=True)}
    for index, plan in enumerate(columns.values()):
        tops = {plan.host_bytes: "bold", plan.peak_bytes: "normal"}
        axes.hlines(plan.peak_bytes / GIB, index - 0.4, index + 0.4, colors="black", linestyles=":")
        for nbytes, weight in tops.items():
            place, text = (index, nbytes / GIB), f"{nbytes / GIB:.1f}"
            axes.annotate(text, place, ha="center", va="bottom", fontweight=weight)
    axes.set_ylabel("host memory of one rank, GiB (dotted: at its peak)")
    axes.set_title(model)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=path.suffix[1:] or None)
        with open(open_anew(path), "wb") as file:
            file.write(picture.getbuffer())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write --plot {path}: {error}") from error
