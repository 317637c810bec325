"""The picture of a command's `--plot FILE`."""

from __future__ import annotations

from pathlib import Path

from memascend.base.charts import Chart, why_none
from memascend.errors import ConfigError
from memascend.system.files import open_anew


def check_picture(path: Path) -> None:
    """Raise ConfigError if matplotlib cannot draw, before a command begins its work."""
    if reason := why_none():
        raise ConfigError(f"--plot {path} cannot be drawn: {reason}")


def write_picture(chart: Chart, path: Path) -> None:
    """Write a chart, in the format of the path's suffix.

    Raises:
        ConfigError: The file cannot be written, or matplotlib knows no such format.
    """
    try:
        picture = chart.picture(file_format=path.suffix[1:] or None, is_alone=True)
        with open(open_anew(path), "wb") as file:
            file.write(picture)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write --plot {path}: {error}") from error
