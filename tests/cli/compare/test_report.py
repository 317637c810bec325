"""What the runs of a comparison are made into: verdicts, a table, and report.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import MIB
from memascend.cli.compare.report import (
    LOG_TAIL_LINE_COUNT,
    Report,
    failures,
    machine,
    table,
    write_json,
)
from memascend.cli.compare.run import Column, Run
from memascend.system.processes import Sample
from tests.support.comparisons import make_report, make_run

BASELINE_BYTES = 50 * MIB


def rows(report: Report) -> dict[str, list[str]]:
    """The table's cells by the title of their row."""
    columns = [[str(cell) for cell in column.cells] for column in table(report).columns]
    return {title: list(cells) for title, *cells in zip(*columns, strict=True)}


def as_json(report: Report, folder: Path) -> dict[str, Any]:
    write_json(report, folder / "report.json")
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "other", "difference"),
    [
        (("2.0", "1.5"), ("2.0", "1.5"), ""),
        (("2.0", "8.0"), ("2.0", "8.000000000000002"), "loss 1: 8.0 and 8.000000000000002"),
        (("2.0",), ("2",), "loss 0: 2.0 and 2"),
        (("2.0", "1.5"), ("2.0",), "2 and 1 losses"),
        ((), ("2.0",), "0 and 1 losses"),
        (("nan",), ("nan",), ""),
    ],
)
def test_the_first_different_digit_is_named(
    losses: tuple[str, ...], other: tuple[str, ...], difference: str
) -> None:
    report = make_report(make_run("stock", *losses), make_run("memascend", *other))
    assert bool(report.loss_difference) == bool(difference)
    assert difference in report.loss_difference
    assert report.exit_status == (1 if difference else 0)


def test_every_run_is_compared_with_the_first() -> None:
    report = make_report(
        make_run("stock", "1"), make_run("memascend", "1"), make_run("stock-tuned", "3")
    )
    assert "stock and stock-tuned" in report.loss_difference


def test_what_failed_is_not_compared_and_is_not_success() -> None:
    report = make_report(
        make_run("stock", "1", problem="exit status 1"), make_run("memascend", "2")
    )
    assert [run.column.name for run in report.complete] == ["memascend"]
    assert report.loss_difference == ""
    assert report.exit_status == 1


@pytest.mark.parametrize(
    ("runs", "verdict", "are_equal"),
    [
        ([], "no losses", None),
        ([make_run("stock"), make_run("memascend")], "no losses", None),
        ([make_run("stock", "1", "2")], "2 printed, nothing to compare", None),
        ([make_run("stock", "1"), make_run("memascend", "1")], "1 printed, all equal", True),
        ([make_run("stock", "1"), make_run("memascend", "2")], "first in loss 0", False),
    ],
)
def test_the_verdict_says_what_was_compared(
    runs: list[Run], verdict: str, are_equal: bool | None, tmp_path: Path
) -> None:
    report = make_report(*runs)
    assert verdict in report.loss_verdict
    assert as_json(report, tmp_path)["losses_equal"] is are_equal


def test_rounded_losses_are_not_called_equal_to_the_last_digit() -> None:
    runs = [make_run(name, "8.377", "0.0123", "nan") for name in ("stock", "memascend")]
    assert "all equal as printed, with at most 4 digits" in make_report(*runs).loss_verdict
    for run in runs:
        run.exact_losses = run.losses
    verdict = make_report(*runs).loss_verdict
    assert verdict == "3 in trainer_state.json, all equal to the last digit"
    exact = [make_run(name, "8.37695312", "2.0") for name in ("stock", "memascend")]
    assert make_report(*exact).loss_verdict == "2 printed, all equal to the last digit"


# -- the table -------------------------------------------------------------------------------------


def test_the_table_has_each_figure_and_its_change_against_the_first_column() -> None:
    smaller = make_run("memascend", "1", "2", "1.5", rss=(100, 150), io_bytes=(3 * MIB, 0))
    shown = rows(make_report(make_run("stock", "1", "2", "1.5"), smaller))
    assert shown["peak RSS"] == ["200.00 MiB", "150.00 MiB (-25 %)"]
    assert shown["read from SSD"] == ["1.00 MiB", "3.00 MiB (+200 %)"]
    assert shown["page-locked"] == ["1.00 MiB", "1.00 MiB (+0 %)"]
    assert shown["step time, mean"] == ["2.00 s", "2.00 s (+0 %)"]
    assert shown["first loss"] == ["1", "1"]
    assert shown["last loss"] == ["1.5", "1.5"]
    assert shown["result"] == ["ok", "ok"]


def test_nothing_is_compared_with_nothing() -> None:
    shown = rows(make_report(make_run("stock"), make_run("memascend", io_bytes=None, samples=[])))
    assert shown["written to SSD"] == ["0 B", "n/a"]
    assert shown["disk used"] == ["n/a", "n/a"]
    assert shown["peak RSS"] == ["200.00 MiB", "n/a"]
    assert shown["first loss"] == shown["last loss"] == ["n/a", "n/a"]
    shown = rows(make_report(make_run("stock"), make_run("memascend")))
    assert shown["written to SSD"] == ["0 B", "0 B"]  # no share of nothing


def test_a_first_column_that_failed_is_no_reference() -> None:
    runs = [
        make_run("stock", "1", problem="exit status 1"),
        make_run("memascend", "1"),
        make_run("b", "1"),
    ]
    shown = rows(make_report(*runs))
    assert shown["peak RSS"] == ["n/a", "200.00 MiB", "200.00 MiB"]
    assert shown["result"] == ["failed", "ok", "ok"]


def test_the_baseline_counts_for_each_process_where_it_was_measured(tmp_path: Path) -> None:
    sample = Sample(0.0, {7: 60 * MIB, 8: 40 * MIB}, locked_bytes=0, registered_bytes=0)
    run = make_run("stock", samples=[sample])
    report = make_report(run, baseline_bytes=BASELINE_BYTES)
    assert rows(report)["peak RSS above imports"] == ["10.00 MiB"]
    assert "50.00 MiB" in str(table(report).caption)
    assert as_json(report, tmp_path)["columns"]["stock"]["rss_above_baseline_bytes_max"] == 10 * MIB
    without = make_report(run)
    assert "peak RSS above imports" not in rows(without)
    assert as_json(without, tmp_path)["columns"]["stock"]["rss_above_baseline_bytes_max"] is None


# -- what is written -------------------------------------------------------------------------------


def test_the_file_has_every_figure_unrounded_by_names(tmp_path: Path) -> None:
    report = make_report(make_run("stock", "1", "2"), skipped={"stock-tuned": "no libaio"})
    found = as_json(report, tmp_path)
    assert found["command"] == "train.py --name 'a b'"
    assert found["skipped"] == {"stock-tuned": "no libaio"}
    assert found["losses_equal"] is None  # there is one run
    assert found["columns"]["stock"]["environment"] == {"A": "stock"}
    [column] = found["columns"]["stock"]["runs"]
    assert column["losses"] == ["1", "2"]
    assert column["step_times_s"] == [2.0]
    assert column["log"] == "stock.log"
    assert {name: value for name, value in column.items() if name.endswith("bytes_max")} == {
        "rss_above_baseline_bytes_max": None,
        "rss_bytes_max": 200 * MIB,
        "pss_bytes_max": 90 * MIB,
        "process_rss_bytes_max": 210 * MIB,
        "locked_bytes_max": MIB,
        "registered_bytes_max": 2 * MIB,
        "disk_bytes_max": None,
    }
    assert (column["read_bytes"], column["written_bytes"]) == (MIB, 0)


def test_a_run_that_never_started_is_in_the_file_too(tmp_path: Path) -> None:
    run = Run(Column("stock", {}), tmp_path / "stock.log", problem="cannot start it")
    [found] = as_json(make_report(run), tmp_path)["columns"]["stock"]["runs"]
    assert (found["problem"], found["rss_bytes_max"], found["losses"]) == (
        "cannot start it",
        None,
        [],
    )


def test_the_machine_is_described_with_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from memascend.cli.compare import report as module

    def version(name: str) -> str:
        if name == "accelerate":
            raise module.importlib.metadata.PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(module.importlib.metadata, "version", version)
    found = machine()
    assert found["versions"]["torch"] == "torch 1"
    assert found["versions"]["accelerate"] is None
    assert found["memory_bytes"] > 0
    monkeypatch.setattr(module, "read_lines", lambda path: [])
    assert machine()["processor"] == module.platform.machine()


def test_a_failure_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "stock.log"
    log.write_text("".join(f"line {index}\n" for index in range(100)), encoding="utf-8")
    broken = make_run("stock", problem="exit status 1")
    broken.log = log
    [text] = failures(make_report(broken, make_run("memascend")))
    first, *lines, last = text.splitlines()
    assert "stock" in first
    assert "exit status 1" in first
    assert lines == [f"  | line {index}" for index in range(100 - LOG_TAIL_LINE_COUNT, 100)]
    assert str(log) in last
    log.unlink()
    assert "exit status 1" in failures(make_report(broken))[0]


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "report.json").symlink_to("victim")
    write_json(make_report(make_run("stock")), tmp_path / "report.json")
    assert not (tmp_path / "report.json").is_symlink()
    assert (tmp_path / "victim").read_text() == "mine"


# -- of several runs for a column ------------------------------------------------------------------


def test_repeated_runs_are_one_column_with_median_and_range(tmp_path: Path) -> None:
    report = make_report(
        make_run("stock", "1", rss=(100,), number=1),
        make_run("memascend", "1", rss=(50,), number=1),
        make_run("stock", "1", rss=(300,), number=2),
        make_run("memascend", "1", rss=(50,), number=2),
    )
    shown = rows(report)
    assert shown["peak RSS"] == [
        "200.00 MiB\n100.00 - 300.00 MiB",
        "50.00 MiB (-75 %)\neach time",
    ]
    assert "median" in str(table(report).caption)
    columns = as_json(report, tmp_path)["columns"]
    assert list(columns) == ["stock", "memascend"]
    assert columns["stock"]["rss_bytes_max"] == 200 * MIB
    assert columns["stock"]["spread"]["rss_bytes_max"] == {
        "median": 200 * MIB,
        "least": 100 * MIB,
        "most": 300 * MIB,
    }
    assert [run["rss_bytes_max"] for run in columns["stock"]["runs"]] == [100 * MIB, 300 * MIB]


def test_a_repeated_run_with_other_losses_is_told_by_its_number() -> None:
    report = make_report(
        make_run("stock", "1", number=1), make_run("stock", "2", number=2), make_run("b", "1")
    )
    assert "stock 1 and stock 2 differ" in report.loss_difference
    assert report.exit_status == 1


def test_a_column_with_some_failed_runs_counts_the_others() -> None:
    report = make_report(
        make_run("stock", "1", rss=(900,), problem="exit status 1", number=1),
        make_run("stock", "1", rss=(100,), number=2),
        make_run("memascend", "1", rss=(50,)),
    )
    shown = rows(report)
    assert shown["peak RSS"] == ["100.00 MiB\neach time", "50.00 MiB (-50 %)"]
    assert shown["result"] == ["1 of 2 failed", "ok"]
    assert report.exit_status == 1
