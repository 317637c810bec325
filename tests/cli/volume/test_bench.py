"""`memascend volume bench`: what it measures, chooses and prints, with and without fio."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memascend import _core
from memascend.base.units import GIB, KIB, MIB
from memascend.cli.main import main
from memascend.cli.volume import bench as volume_bench
from memascend.cli.volume import fio as volume_fio
from memascend.cli.volume.bench import CHUNKS, DEPTHS, Setting, choose
from memascend.config.environment import cache_directory
from memascend.errors import StoreError
from memascend.volumes.kept import SHORT_RATES_FILE, kept_rates
from memascend.volumes.speed import Load

QUICK = ["--seconds", "0.02", "--span", "16MiB", "--chunk", "64KiB,128KiB", "--depth", "2",
         "--engine", "threads"]  # fmt: skip


class FakeBench:
    """Drives that give what a test says: by their number, the load, the mode, and their place."""

    loads: list[Load]

    def __init__(
        self, volumes: list[_core.VolumeOptions], load: Load, advance: Callable[[int], None]
    ) -> None:
        self._count, self._load = len(volumes), load
        advance(10**9)
        self.loads.append(load)
        self.engine = "threads"

    def __enter__(self) -> FakeBench:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, mode: str, seconds: float) -> list[float]:
        assert seconds == 0.02
        speed = {"read": 3e9, "write": 1e9, "mixed": 2e9}[mode] * self._load.chunk_bytes / MIB
        return [speed * (place + 1) / self._count for place in range(self._count)]

    def traffic(self) -> list[dict[str, Any]]:
        latencies = {"reads": {"p99_s": 0.002}, "writes": {"p99_s": 0.0151}}
        return [latencies | {"bytes_written": 10**9}] * self._count


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    FakeBench.loads = []
    monkeypatch.setattr(volume_bench, "Bench", FakeBench)
    monkeypatch.setattr(volume_fio, "find", lambda: None)
    return FakeBench


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep rates of drives elsewhere than for the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def drives(tmp_path: Path) -> list[str]:
    """Two folders."""
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    return list(map(str, paths))


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["volume", "bench", "--json", *QUICK, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- what is measured ------------------------------------------------------------------------------


def test_a_drive_is_really_measured_and_left_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, "--no-fio", str(tmp_path))
    assert found["engine"] == "threads"
    assert [sample["chunk_bytes"] for sample in found["sweep"]] == [64 * KIB, 128 * KIB]
    assert found["chosen"]["chunk_bytes"] in (64 * KIB, 128 * KIB)
    [drive] = found["drives"]
    assert drive["path"] == str(tmp_path)
    assert all(drive[mode] > 0 for mode in ("read", "write", "mixed"))
    for latency in drive["latency"].values():
        assert 0 < latency["p50_s"] <= latency["p99_s"] <= latency["p999_s"] <= latency["longest_s"]
    assert (found["together"], found["fio"]) == ([], "not asked")
    assert "weights" not in found
    assert list(tmp_path.iterdir()) == []
    kept = kept_rates([str(tmp_path)], cache=cache_directory(), name=SHORT_RATES_FILE)
    assert kept is not None
    assert kept.read_gb_s == pytest.approx(drive["read"] / 1e9, abs=1e-3)


def test_several_drives_are_measured_alone_and_together(
    drives: list[str], capsys: pytest.CaptureFixture[str], fake: type[FakeBench]
) -> None:
    found = as_json(capsys, *drives)
    assert found["chosen"] == {"chunk_bytes": 128 * KIB, "queue_depth": 2}
    assert [drive["mixed"] for drive in found["drives"]] == [0.25e9, 0.25e9]
    assert [rates["mixed"] for rates in found["together"]] == [0.125e9, 0.25e9]
    assert [rates["read"] for rates in found["together"]] == [0.1875e9, 0.375e9]
    assert found["weights"] == [1.0, 2.0]
    assert {load.span_bytes for load in fake.loads} == {16 * MIB}
    assert {load.engine for load in fake.loads} == {"threads"}


def test_left_to_itself_it_tries_every_size_with_every_depth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: type[FakeBench]
) -> None:
    assert main(["volume", "bench", "--json", "--seconds", "0.02", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    tried = [(sample["chunk_bytes"], sample["queue_depth"]) for sample in found["sweep"]]
    assert tried == [(chunk, depth) for chunk in CHUNKS for depth in DEPTHS]
    assert {load.span_bytes for load in fake.loads} == {GIB}


def test_the_smallest_setting_about_as_fast_as_the_fastest_is_chosen() -> None:
    samples = [Setting(MIB, 64, 10.0), Setting(MIB, 32, 9.8), Setting(MIB, 8, 9.0)]
    assert choose(samples).queue_depth == 32
    # Of those with as much in flight the fastest.
    assert choose([Setting(MIB, 16, 9.9), Setting(2 * MIB, 8, 10.0)]).queue_depth == 8


def test_a_folder_that_is_missing_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: type[FakeBench]
) -> None:
    assert main(["volume", "bench", *QUICK, str(tmp_path / "none")]) == 1
    assert "cannot use the volume" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert fake.loads == []


def test_one_folder_under_two_names_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: type[FakeBench]
) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to("drive")
    paths = [str(tmp_path / name) for name in ("drive", "link")]
    assert main(["volume", "bench", *QUICK, *paths]) == 1
    error = capsys.readouterr().err
    assert all(path in error for path in paths)


# -- what is printed -------------------------------------------------------------------------------


def test_the_table_says_the_setting_and_the_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: type[FakeBench]
) -> None:
    assert main(["volume", "bench", *QUICK, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for part in ("GB/s", "0.38", "0.12", "0.25", "128.00 KiB x 2", "fio is not installed"):
        assert part in printed
    [line] = [line for line in printed.splitlines() if line.startswith('"memascend": ')]
    block = json.loads(f"{{{line}}}")["memascend"]
    assert block == {"direct_nvme": {"chunk_bytes": 128 * KIB, "queue_depth": 2}}


def test_a_short_run_says_that_a_cache_may_be_larger_than_its_writes(
    drives: list[str], capsys: pytest.CaptureFixture[str], fake: type[FakeBench]
) -> None:
    assert main(["volume", "bench", *QUICK, *drives]) == 0
    printed = capsys.readouterr().out
    # Two settings of the sweep, alone, and beside the other.
    assert "this run wrote 4.0 GB to each drive" in printed
    assert "--sustained measures it" in printed
    found = as_json(capsys, *drives)
    assert [drive["written_bytes"] for drive in found["drives"]] == [4 * 10**9] * 2


def test_a_terminal_shows_which_measurement_goes_on_and_what_was_moved(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fake: type[FakeBench],
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["volume", "bench", "--json", *QUICK, str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert f"5/5 {tmp_path}: mixed" in printed.err
    assert "3.0/? GB" in printed.err


def test_brackets_in_a_path_are_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fake: type[FakeBench],
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    paths = [str(tmp_path / name) for name in ("[red]", "[b")]
    for path in paths:
        os.mkdir(path)
    assert main(["volume", "bench", *QUICK, *paths]) == 0
    printed = capsys.readouterr().out
    assert all(printed.count(f" {path}") == 2 for path in paths)  # alone, beside the others


def test_a_setting_that_is_the_default_needs_no_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: type[FakeBench]
) -> None:
    words = ["--chunk", "2MiB", "--depth", "64", str(tmp_path)]
    assert main(["volume", "bench", *QUICK, *words]) == 0
    assert '"memascend"' not in capsys.readouterr().out


def test_several_drives_give_one_block_and_a_warning_where_they_are_one(
    drives: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    fake: type[FakeBench],
) -> None:
    assert main(["volume", "bench", *QUICK, *drives]) == 0
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if line.startswith('"memascend": ')]
    block = json.loads(f"{{{line}}}")["memascend"]
    assert block["direct_nvme"]["queue_depth"] == 2
    assert block["volumes"] == [
        {"path": drives[0], "weight": 1.0},
        {"path": drives[1], "weight": 2.0},
    ]
    [total] = [line for line in lines if "all together" in line]
    assert "0.38" in total  # mixed
    [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert all(path in warning for path in drives)


# -- beside fio ------------------------------------------------------------------------------------


def test_fio_gets_the_setting_that_was_chosen(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fake: type[FakeBench],
) -> None:
    asked: list[tuple[str, str, int, int, str]] = []

    def run(program: str, volume: _core.VolumeOptions, **of: Any) -> float:
        load = of["load"]
        asked.append((program, of["mode"], load.chunk_bytes, load.queue_depth, of["engine"]))
        return 1.5e9

    monkeypatch.setattr(volume_fio, "find", lambda: "/bin/fio")
    monkeypatch.setattr(volume_fio, "run", run)
    found = as_json(capsys, str(tmp_path))
    modes = ("read", "write", "mixed")
    assert found["drives"][0]["fio"] == dict.fromkeys(modes, 1.5e9)
    assert asked == [("/bin/fio", mode, 128 * KIB, 2, "threads") for mode in modes]
    assert found["fio"] == "/bin/fio"
    asked.clear()
    assert "fio" not in as_json(capsys, "--no-fio", str(tmp_path))["drives"][0]
    assert asked == []


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_a_failing_fio_is_reported_beside_our_figures(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fake: type[FakeBench],
    output: list[str],
) -> None:
    def fail(*_: object, **__: object) -> float:
        raise StoreError(0, "fio failed: [no] room")

    monkeypatch.setattr(volume_fio, "find", lambda: "/bin/fio")
    monkeypatch.setattr(volume_fio, "run", fail)
    assert main(["volume", "bench", *output, *QUICK, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "fio failed: [no] room" in printed
    if output:
        [drive] = json.loads(printed)["drives"]
        assert (drive["mixed"], list(drive["fio"])) == (0.25e9, ["error"])
