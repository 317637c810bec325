"""What the runs of a comparison are made into: verdicts, a table, report.json and a picture."""

from __future__ import annotations

import json
import sys
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
    write_picture,
)
from memascend.cli.compare.run import Column, Run
from memascend.system.processes import Peaks, Sample

BASELINE_BYTES = 50 * MIB


def make(name: str, *losses: str, rss: tuple[int, ...] = (100, 200), **changes: Any) -> Run:
    """A run of one process whose resident MiB were these, a second each."""
    samples = [
        Sample(float(second), {7: size * MIB}, locked_bytes=MIB, registered_bytes=2 * MIB)
        for second, size in enumerate(rss)
    ]
    settings: dict[str, Any] = {
        "exit_status": 0,
        "losses": list(losses),
        "loss_times_s": [2.0 * index for index in range(len(losses))],
        "samples": samples,
        "peaks": Peaks(pss_bytes=90 * MIB, disk_bytes=0, process_rss_bytes={7: 210 * MIB}),
        "io_bytes": (MIB, 0),
    }
    return Run(Column(name, {"A": name}), Path("/none", f"{name}.log"), **(settings | changes))


def report_of(*runs: Run, baseline_bytes: int = 0, skipped: dict[str, str] | None = None) -> Report:
    return Report(["train.py", "--name", "a b"], baseline_bytes, runs, skipped or {})


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
    report = report_of(make("stock", *losses), make("memascend", *other))
    assert bool(report.loss_difference) == bool(difference)
    assert difference in report.loss_difference
    assert report.exit_status == (1 if difference else 0)


def test_every_run_is_compared_with_the_first() -> None:
    report = report_of(make("stock", "1"), make("memascend", "1"), make("stock-tuned", "3"))
    assert "stock and stock-tuned" in report.loss_difference


def test_what_failed_is_not_compared_and_is_not_success() -> None:
    report = report_of(make("stock", "1", problem="exit status 1"), make("memascend", "2"))
    assert [run.column.name for run in report.complete] == ["memascend"]
    assert report.loss_difference == ""
    assert report.exit_status == 1


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([], "no losses"),
        ([make("stock"), make("memascend")], "no losses"),
        ([make("stock", "1", "2")], "2 printed, nothing to compare"),
        ([make("stock", "1"), make("memascend", "1")], "1 printed, all equal"),
        ([make("stock", "1"), make("memascend", "2")], "first in loss 0"),
    ],
)
def test_the_verdict_says_what_was_compared(runs: list[Run], verdict: str) -> None:
    assert verdict in report_of(*runs).loss_verdict


# -- the table -------------------------------------------------------------------------------------


def test_the_table_has_each_figure_and_its_change_against_the_first_column() -> None:
    smaller = make("memascend", "1", "2", "1.5", rss=(100, 150), io_bytes=(3 * MIB, 0))
    shown = rows(report_of(make("stock", "1", "2", "1.5"), smaller))
    assert shown["peak RSS"] == ["200.00 MiB", "150.00 MiB (-25 %)"]
    assert shown["read from SSD"] == ["1.00 MiB", "3.00 MiB (+200 %)"]
    assert shown["page-locked"] == ["1.00 MiB", "1.00 MiB (+0 %)"]
    assert shown["step time, mean"] == ["2.00 s", "2.00 s (+0 %)"]
    assert shown["first loss"] == ["1", "1"]
    assert shown["last loss"] == ["1.5", "1.5"]
    assert shown["result"] == ["ok", "ok"]


def test_nothing_is_compared_with_nothing() -> None:
    shown = rows(report_of(make("stock"), make("memascend", io_bytes=None, samples=[])))
    assert shown["written to SSD"] == ["0 B", "n/a"]
    assert shown["disk used"] == ["n/a", "n/a"]
    assert shown["peak RSS"] == ["200.00 MiB", "n/a"]
    assert shown["first loss"] == shown["last loss"] == ["n/a", "n/a"]
    shown = rows(report_of(make("stock"), make("memascend")))
    assert shown["written to SSD"] == ["0 B", "0 B"]  # no share of nothing


def test_a_first_column_that_failed_is_no_reference() -> None:
    runs = [make("stock", "1", problem="exit status 1"), make("memascend", "1"), make("b", "1")]
    shown = rows(report_of(*runs))
    assert shown["peak RSS"] == ["n/a", "200.00 MiB", "200.00 MiB"]
    assert shown["result"] == ["failed", "ok", "ok"]


def test_the_baseline_counts_for_each_process_where_it_was_measured(tmp_path: Path) -> None:
    sample = Sample(0.0, {7: 60 * MIB, 8: 40 * MIB}, locked_bytes=0, registered_bytes=0)
    run = make("stock", samples=[sample])
    report = report_of(run, baseline_bytes=BASELINE_BYTES)
    assert rows(report)["peak RSS above imports"] == ["10.00 MiB"]
    assert "50.00 MiB" in str(table(report).caption)
    assert as_json(report, tmp_path)["columns"]["stock"]["rss_above_baseline_bytes_max"] == 10 * MIB
    without = report_of(run)
    assert "peak RSS above imports" not in rows(without)
    assert as_json(without, tmp_path)["columns"]["stock"]["rss_above_baseline_bytes_max"] is None


# -- what is written -------------------------------------------------------------------------------


def test_the_file_has_every_figure_unrounded_by_names(tmp_path: Path) -> None:
    report = report_of(make("stock", "1", "2"), skipped={"stock-tuned": "no libaio"})
    found = as_json(report, tmp_path)
    assert found["command"] == "train.py --name 'a b'"
    assert found["skipped"] == {"stock-tuned": "no libaio"}
    assert found["losses_equal"] is True
    column = found["columns"]["stock"]
    assert column["environment"] == {"A": "stock"}
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
    found = as_json(report_of(run), tmp_path)["columns"]["stock"]
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
    broken = make("stock", problem="exit status 1")
    broken.log = log
    [text] = failures(report_of(broken, make("memascend")))
    first, *lines, last = text.splitlines()
    assert "stock" in first
    assert "exit status 1" in first
    assert lines == [f"  | line {index}" for index in range(100 - LOG_TAIL_LINE_COUNT, 100)]
    assert str(log) in last
    log.unlink()
    assert "exit status 1" in failures(report_of(broken))[0]


@pytest.mark.parametrize("baseline_bytes", [0, BASELINE_BYTES])
def test_a_picture_is_drawn_of_whatever_was_sampled(tmp_path: Path, baseline_bytes: int) -> None:
    pytest.importorskip("matplotlib")
    for runs in ([make("stock"), make("memascend", samples=[])], []):
        path = tmp_path / f"{len(runs)}.png"
        assert write_picture(report_of(*runs, baseline_bytes=baseline_bytes), path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "victim").write_text("mine")
    for name, write in (("report.json", write_json), ("rss.png", write_picture)):
        (tmp_path / name).symlink_to("victim")
        write(report_of(make("stock")), tmp_path / name)
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "victim").read_text() == "mine"


def test_without_matplotlib_no_picture_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not write_picture(report_of(make("stock")), tmp_path / "rss.png")
    assert not (tmp_path / "rss.png").exists()
