"""The figures of runs: what counts, how they are shown, and what several runs make of them."""

from __future__ import annotations

import pytest

from memascend.base.units import MIB
from memascend.cli.compare.figures import UNKNOWN, Spread, figures, shown_figures
from tests.support.comparisons import make_run

BY_KEY = {figure.key: figure for figure in figures(50 * MIB)}
PEAK = BY_KEY["rss_bytes_max"]


@pytest.mark.parametrize(
    ("sizes", "spread"),
    [((100,), (100, 100, 100)), ((300, 100, 200), (200, 100, 300)), ((100, 200), (150, 100, 200))],
)
def test_of_several_runs_the_median_counts(
    sizes: tuple[int, ...], spread: tuple[int, int, int]
) -> None:
    runs = [make_run("stock", rss=(size,)) for size in sizes]
    assert PEAK.of_runs(runs) == Spread(*(size * MIB for size in spread))


def test_runs_that_failed_or_have_no_value_do_not_count() -> None:
    runs = [
        make_run("stock", rss=(900,), problem="exit status 1"),
        make_run("stock", samples=[]),
        make_run("stock", rss=(100,)),
    ]
    assert PEAK.of_runs(runs) == Spread(100 * MIB, 100 * MIB, 100 * MIB)
    assert PEAK.of_runs(runs[:2]) is None
    assert PEAK.show(runs[:2]) == UNKNOWN


def test_one_run_is_shown_without_a_range_and_several_with_one() -> None:
    one, other, large = (make_run("stock", rss=(size,)) for size in (100, 150, 2048))
    assert PEAK.show([one]) == "100.00 MiB"
    assert PEAK.show([one, other]) == "125.00 MiB\n100.00 - 150.00 MiB"
    assert PEAK.show([one, one]) == "100.00 MiB\neach time"
    assert PEAK.show([one, large]) == "1.05 GiB\n100.00 MiB - 2.00 GiB"


def test_the_change_is_that_of_the_medians() -> None:
    before = [make_run("stock", rss=(size,)) for size in (100, 200, 900)]
    now = [make_run("memascend", rss=(size,)) for size in (50, 100, 150)]
    assert PEAK.show(now, before) == "100.00 MiB (-50 %)\n50.00 - 150.00 MiB"
    assert PEAK.change(now, None) == ""
    assert PEAK.change(now, [make_run("stock", samples=[])]) == ""
    written = BY_KEY["written_bytes"]
    assert written.change(now, before) == ""  # no share of nothing


def test_what_was_not_measured_is_not_shown() -> None:
    keys = [figure.key for figure in shown_figures(50 * MIB)]
    assert keys[0] == "rss_above_baseline_bytes_max"
    assert keys[1:] == [figure.key for figure in shown_figures(0)]
    assert figures(0)[0].of_run(make_run("stock")) is None
    assert BY_KEY["rss_above_baseline_bytes_max"].of_run(make_run("stock")) == 150 * MIB
