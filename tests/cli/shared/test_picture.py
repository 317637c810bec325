"""A picture on the drive: written anew, or an error that says why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.base.charts import Chart, Quantity, Series, line_chart
from memascend.cli.shared.picture import check_picture, write_picture
from memascend.errors import ConfigError

pytest.importorskip("matplotlib")


@pytest.fixture
def chart() -> Chart:
    found = line_chart("a line", Quantity("height"), [Series("line", [(0, 1), (1, 2)])])
    assert found is not None
    return found


def test_the_suffix_is_the_format(tmp_path: Path, chart: Chart) -> None:
    check_picture(tmp_path / "chart.png")
    write_picture(chart, tmp_path / "chart.png")
    write_picture(chart, tmp_path / "chart.svg")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "a line" in (tmp_path / "chart.svg").read_text()


def test_a_link_in_the_place_of_a_picture_is_not_followed(tmp_path: Path, chart: Chart) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "chart.png").symlink_to("victim")
    write_picture(chart, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("path", ["/nowhere/chart.png", "chart.unknown"])
def test_a_picture_that_cannot_be_written_is_an_error(path: str, chart: Chart) -> None:
    with pytest.raises(ConfigError, match="cannot write --plot"):
        write_picture(chart, Path(path))
