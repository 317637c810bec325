"""The page as a document: what is on it, that it stands alone, and that nothing gets out of text.

`test_page_in_browser.py` looks at it in a browser.
"""

from __future__ import annotations

import base64
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from memascend.base import charts
from memascend.base.charts import DARK, LIGHT
from memascend.base.units import MIB
from memascend.cli.compare import page as module
from memascend.cli.compare.page import render, write_page
from memascend.cli.compare.report import Report
from tests.support.comparisons import make_comparison, make_report, make_run
from tests.support.source_tree import ROOT

VOID = {"meta", "link", "br", "source", "img"}

SVG = "data:image/svg+xml;base64"
#: Memory twice, components, phases, steps, the drive twice, losses.
CHART_COUNT = 8


class Document(HTMLParser):
    """Elements with their attributes and text; refuses what is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def drawn() -> str:
    """Return a page with its pictures."""
    return render(make_comparison(repeat=2))


@pytest.fixture(autouse=True)
def undrawn(drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures of all other pages empty, which are slow to draw."""
    monkeypatch.setattr(charts.Chart, "picture", lambda self, palette: b"<svg/>")


def page(report: Report) -> Document:
    return Document(render(report))


def test_everything_is_on_it_the_headlines_first() -> None:
    text = page(make_comparison()).text
    titles = (
        "stock and memascend, side by side",
        "Every run succeeded",
        "train.py --name 'a b'",
        "peak RSS above imports",
        "page-locked",
        "step time, mean",
        "equal 3 printed, all equal to the last digit",
        "All figures",
        "Resident memory above a process that has only imported",
        "Host memory of rank 0 by component, memascend",
        "Planned and measured, memascend",
        "Time of each step",
        "memascend: 10.00 s for a step on average",
        "forward 2.00 s 1.00 s 1.00 s 0.00 s 0.00 s 16.00 MiB 32.00 MiB",
        "Drive nvme0n1: read per second",
        "Requests of rank 0 by class",
        "Every digit that was printed",
        "2 1.0000000000000002 1.0000000000000002 yes",
        "What differs between the runs",
        "The machine",
    )
    places = [text.find(title) for title in titles]
    assert -1 not in places
    assert places == sorted(places)


def test_headlines_compare_with_the_first_column() -> None:
    text = page(make_comparison()).text
    assert "peak RSS above imports stock 389.00 MiB memascend 89.00 MiB -77 %" in text


def test_repeated_runs_show_medians_with_ranges() -> None:
    text = page(make_comparison(repeat=3)).text
    assert "run several times" in text
    assert "Medians and ranges" in text
    assert "2.00 s each time" in text
    assert "memascend 1: 10.00 s for a step" in text
    assert "memascend 3" in text  # of the losses


def test_it_needs_nothing_from_anywhere_and_runs_no_script(drawn: str) -> None:
    text = drawn
    found = Document(text)
    assert not found.all("script") + found.all("iframe") + found.all("object")
    addresses = [
        value
        for _, attributes in found.elements
        for name, value in attributes.items()
        if name in ("href", "src", "srcset", "action", "data")
    ]
    assert {address.partition(",")[0] for address in addresses} == {"data:", SVG}
    assert not re.search(r"https?:|url\(|@import", text)
    assert not [name for _, attributes in found.elements for name in attributes if name[:2] == "on"]
    [policy] = [meta for meta in found.all("meta") if "http-equiv" in meta]
    assert policy["content"].startswith("default-src 'none'")


def test_what_others_wrote_stays_text() -> None:
    bad = "</pre><script>alert(1)</script>\"'&"
    log = make_run(bad, "1.0", problem=bad)
    config = {bad: bad, "memascend": {bad: 1}}
    report = make_report(log, make_run("memascend", "1.0"), skipped={bad: bad}, config=config)
    text = render(Report([bad], 0, report.runs, report.skipped, report.config))
    found = Document(text)
    assert found.all("script") == []
    assert "<script" not in text
    assert found.text.count("</pre><script>alert(1)</script>") >= 7
    assert "<b>" not in render(make_comparison())
    assert "<swap>" not in render(make_comparison())


def test_it_can_be_read_aloud() -> None:
    found = page(make_comparison())
    assert [html["lang"] for html in found.all("html")] == ["en"]
    assert len(found.all("title")) > 0
    assert len(found.all("h1")) == 1
    assert len(found.all("caption")) == len(found.all("table")) > 3
    pictures = found.all("img")
    assert len(pictures) == len(found.all("figure")) == CHART_COUNT
    assert all(re.search(r"\d (MiB|s)|at most", picture["alt"]) for picture in pictures)
    names = {attributes["id"] for _, attributes in found.elements if "id" in attributes}
    used = {region["aria-labelledby"] for region in found.all("div") if "aria-labelledby" in region}
    assert used <= names
    assert all(cell.get("scope") for cell in found.all("th"))


def test_every_chart_is_there_in_light_and_dark(drawn: str) -> None:
    found = Document(drawn)
    light, dark = (
        [base64.b64decode(each[name].removeprefix(f"{SVG},")) for each in found.all(tag)]
        for tag, name in (("img", "src"), ("source", "srcset"))
    )
    assert len(light) == len(dark) == CHART_COUNT
    for pictures, palette in ((light, LIGHT), (dark, DARK)):
        for picture in pictures:
            ElementTree.fromstring(picture)
            assert f"fill: {palette.paper}".encode() in picture
    assert {source["media"] for source in found.all("source")} == {"(prefers-color-scheme: dark)"}


def test_without_matplotlib_there_is_a_page_that_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = page(make_comparison())
    assert "This page has no charts: matplotlib cannot be imported" in found.text
    assert "pip install 'memascend[plot]'" in found.text
    assert found.all("img") + found.all("figure") == []
    assert "forward 2.00 s 1.00 s" in found.text
    assert "2 1.0000000000000002 1.0000000000000002 yes" in found.text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(scheme: str) -> None:
    """WCAG 2.1, level AA: 4.5 to 1 for text, 3 to 1 for graphics."""
    style = (ROOT / "memascend/cli/compare/templates/page.css").read_text(encoding="utf-8")
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(roots) == 2
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", roots[scheme == "dark"]))
    for front in ("ink", "quiet", "good", "bad"):
        for back in ("paper", "card"):
            assert contrast(colours[front], colours[back]) >= 4.5, (front, back)
    palette = DARK if scheme == "dark" else LIGHT
    # Pictures have the colours of the cards that they are on.
    assert [palette.paper, palette.ink] == [colours["card"], colours["ink"]]
    for graphic in palette.series:
        assert contrast(graphic, palette.paper) >= 3, graphic


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(p * weight for p, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_all_that_it_is_made_from_is_packaged() -> None:
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    package_data = settings.partition("[tool.setuptools.package-data]")[2].partition("\n[")[0]
    package = ROOT / "memascend"
    packaged = {
        path for pattern in re.findall('"(.*?)"', package_data) for path in package.glob(pattern)
    }
    templates = set((package / "cli/compare/templates").iterdir())
    assert len(templates) == 2
    assert templates <= packaged


# -- with less to show -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (make_report(), "not compared no losses printed"),
        (make_report(make_run("stock", "1")), "nothing to compare them with"),
        (make_report(make_run("stock", samples=[], io_bytes=None)), "n/a"),
        (make_report(make_run("a", "1"), make_run("b", "2")), "Losses differ"),
        (make_report(make_run("a", "1"), make_run("b", "2")), "different a and b differ"),
        (make_report(make_run("a", problem="exit status 1")), "1 of 1 runs failed"),
        (make_report(skipped={"stock": "no libaio.h"}), "stock was left out: no libaio.h"),
    ],
)
def test_whatever_is_missing_there_is_a_page(report: Report, said: str) -> None:
    assert said in page(report).text


def test_a_run_that_failed_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    run = make_run("stock", problem="exit status 1")
    run.log = tmp_path / "stock.log"
    run.log.write_text("not enough <buffers>\n", encoding="utf-8")
    text = page(make_report(run)).text
    assert "stock failed: exit status 1" in text
    assert "| not enough <buffers>" in text


def test_of_many_losses_the_table_has_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOSS_ROWS_MAX", 2)
    runs = [make_run(name, "4.0", "3.0", "2.03125") for name in ("stock", "memascend")]
    text = page(make_report(*runs)).text
    assert "of the first 2 losses; all are in report.json" in text
    assert "1 3.0 3.0 yes" in text
    assert "2 2.03125 2.03125" not in text
    runs = [make_run(name, "4.0", "3.0") for name in ("stock", "memascend")]
    assert "of the first" not in page(make_report(*runs)).text


def test_settings_show_what_differs() -> None:
    runs = [make_run("stock"), make_run("memascend")]
    report = make_report(*runs, config={"memascend": {"verify": "reads"}, "bf16": {}})
    text = page(report).text
    assert '"memascend" in the JSON {"verify": "reads"} {"verify": "reads"}' in text
    assert "A stock memascend" in text
    assert '"bf16": {}' in text
    runs[0].column.environment["MEMASCEND_DISABLE"] = "1"  # type: ignore[index]
    text = page(report).text
    assert "MEMASCEND_DISABLE 1 not set" in text
    assert '"memascend" in the JSON not looked at {"verify": "reads"}' in text


def test_a_run_without_an_end_has_components_and_no_ledger() -> None:
    report = make_comparison()
    ours = report.runs[1]
    ours.recording.ledger["peak_note"] = "peak above planned (staging slots): why"
    assert "peak above planned (staging slots): why" in page(report).text
    ours.recording = type(ours.recording)(ours.recording.marks)
    text = page(report).text
    assert "Host memory of rank 0 by component, memascend" in text
    assert "Planned and measured" not in text


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "report.html").symlink_to("victim")
    write_page(make_report(make_run("stock", rss=(100 * MIB,))), tmp_path / "report.html")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
