"""The page as people see it: on wide and narrow screens, in light and dark, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from memascend.base.charts import HEIGHT, WIDTH
from memascend.cli.compare.page import write_page
from tests.support.browser import Browser, why_not
from tests.support.comparisons import make_comparison

WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")
#: Memory twice, components, phases, steps, the drive twice, losses.
CHART_COUNT = 8
#: Of the text in a chart, in the chart's own units.
TEXT_SIZE = 13
BOXES = """[...document.querySelectorAll("{selector}")].map(
    element => element.getBoundingClientRect()).map(box => [box.left, box.right, box.height])"""
STYLES = """[...document.querySelectorAll("{selector}")].map(
    element => getComputedStyle(element).{name})"""


@pytest.fixture(scope="module", params=[(w, s) for w in WIDTHS for s in SCHEMES], ids=str)
def seen(
    request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Browser, int, str]:
    """The page in the browser, the width and the scheme."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(make_comparison(repeat=2), path)
    width, scheme = request.param
    browser.console()
    browser.look(path, width=width, scheme=scheme)
    return browser, width, scheme


Seen = tuple[Browser, int, str]


def test_the_console_is_silent_and_nothing_is_fetched(seen: Seen) -> None:
    browser, _, _ = seen
    assert browser.console() == []
    assert browser.ask("performance.getEntriesByType('resource').length") == 0


def test_the_page_is_no_wider_than_the_screen(seen: Seen) -> None:
    browser, width, _ = seen
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth") <= width
    for selector in (".card", "figure", ".scroll", "pre", "h1", "h2"):
        boxes = browser.ask(BOXES.format(selector=selector))
        assert boxes, selector
        assert all(left >= 0 and right <= width for left, right, _ in boxes), selector


def test_every_chart_is_large_enough_to_be_read(seen: Seen) -> None:
    browser, _, _ = seen
    boxes = browser.ask(BOXES.format(selector="figure img"))
    assert len(boxes) == CHART_COUNT
    for left, right, height in boxes:
        assert TEXT_SIZE * (right - left) / WIDTH >= 11
        assert height / (right - left) == pytest.approx(HEIGHT / WIDTH, rel=0.01)
    drawn = browser.ask("[...document.images].map(image => image.complete && image.naturalWidth)")
    assert all(drawn)


def test_colours_follow_the_scheme(seen: Seen) -> None:
    browser, _, scheme = seen
    [paper] = browser.ask(STYLES.format(selector="body", name="backgroundColor"))
    [ink] = browser.ask(STYLES.format(selector="body", name="color"))
    assert (brightness(paper) > brightness(ink)) == (scheme == "light")
    shown = browser.ask("[...document.images].map(image => image.currentSrc == image.src)")
    assert shown == [scheme == "light"] * CHART_COUNT


def test_wide_tables_scroll_in_their_own_box(seen: Seen) -> None:
    browser, width, _ = seen
    widths = browser.ask(
        "[...document.querySelectorAll('.scroll')].map(e => [e.clientWidth, e.scrollWidth])"
    )
    assert any(inner > outer for outer, inner in widths) == (width == min(WIDTHS))


def brightness(colour: str) -> int:
    """Of "rgb(1, 2, 3)"."""
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


def test_what_is_missing_for_a_browser_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "chromium" in why_not()
    assert "chromedriver" in why_not()
