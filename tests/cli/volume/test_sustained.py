"""`memascend volume bench --sustained`: what it measures, says, draws and keeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from memascend import _core
from memascend.cli.main import main
from memascend.cli.volume import sustained
from memascend.cli.volume.sustained import describe
from memascend.config.environment import cache_directory
from memascend.volumes.kept import KeptRates, kept_rates
from memascend.volumes.speed import Load, Watch
from memascend.volumes.sustained import Curve

GB = 10**9
WRITES = GB // 10


class Bench:
    """Drives that write 1.1 GB at 4 GB/s and the rest at 0.5 GB/s, of which 5 GB have room."""

    now: float
    load: Load
    cache_bytes = 11 * WRITES
    room_bytes = 5 * GB

    def __init__(
        self,
        volumes: Sequence[_core.VolumeOptions],
        load: Load,
        advance: Callable[[int], None],
        watches: Sequence[Watch],
    ) -> None:
        type(self).load = load
        self.engine, self._written = "threads", []
        for watch in watches:
            type(self).now, written = 0.0, 0
            while written < self.room_bytes:
                type(self).now += WRITES / (4 * GB if written < self.cache_bytes else GB / 2)
                written += WRITES
                if watch(WRITES):
                    break
            self._written.append(written)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, mode: str, seconds: float) -> list[float]:
        return [{"mixed": 0.8e9, "read": 3e9}[mode]] * len(self._written)

    def traffic(self) -> list[dict[str, Any]]:
        return [{"bytes_written": written} for written in self._written]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Bench]:
    class ThisBench(Bench):
        pass

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sustained, "Bench", ThisBench)
    monkeypatch.setattr(
        sustained, "Curve", lambda interval_s: Curve(interval_s, clock=lambda: ThisBench.now)
    )
    return ThisBench


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(["volume", "bench", "--sustained", "--seconds", "0.04", *arguments]) == 0
    printed = capsys.readouterr()
    return printed.out, printed.err


def test_a_drive_is_really_written_and_left_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    named = {"span_bytes": 64 << 20}
    monkeypatch.setattr(sustained, "Load", lambda **of: Load(**(of | named)))
    arguments = ("--seconds", "0.01", "--engine", "threads", "--json", "--share", "0.01")
    out, _ = ran(capsys, *arguments, "--chunk", "1MiB", "--depth", "4", str(drive))
    [found] = json.loads(out)["drives"]
    assert found["written_bytes"] == 64 << 20
    assert all(found[mode] > 0 for mode in ("read", "write", "mixed"))
    assert found["curve"][-1]["written_bytes"] <= 64 << 20
    assert list(drive.iterdir()) == []


def test_the_rate_past_the_cache_is_told_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: type[Bench]
) -> None:
    out, err = ran(capsys, str(tmp_path))
    assert "the write cache ends after 1.1 GB: 4.00 GB/s before, 0.50 GB/s in the end" in out
    assert "not settled" not in out
    assert "--drive-read 3.00 --drive-write 0.50 --drive-mixed 0.80" in out
    assert "50% of its free space" in err
    assert kept_rates([str(tmp_path)], cache=cache_directory()) == KeptRates(3.0, 0.5, 0.8)
    assert bench.load.span_share == 0.5
    assert (bench.load.chunk_bytes, bench.load.queue_depth) == (2 << 20, 64)


def test_it_ends_when_the_rate_has_settled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: type[Bench]
) -> None:
    bench.room_bytes = 1000 * GB
    out, _ = ran(capsys, "--json", str(tmp_path))
    [found] = json.loads(out)["drives"]
    assert found["state"] == "settled"
    assert found["written_bytes"] < 5 * GB


def test_rates_that_may_be_those_of_a_cache_are_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: type[Bench]
) -> None:
    bench.cache_bytes = 10 * GB
    out, _ = ran(capsys, "--share", "0.1", str(tmp_path))
    assert "stayed at 4.00 GB/s for all of 5.0 GB: the drive has no write cache, or one that" in out
    assert "not kept" in out
    assert kept_rates([str(tmp_path)], cache=cache_directory()) is None
    out, _ = ran(capsys, str(tmp_path))
    assert "not kept" not in out
    assert kept_rates([str(tmp_path)], cache=cache_directory()) == KeptRates(3.0, 4.0, 0.8)


def test_a_drive_whose_rate_still_falls_is_told() -> None:
    drive = {"state": "falling", "written_bytes": 9 * GB, "cache_bytes": 8 * GB,
             "cache_rate": 4e9, "write": 1e9}  # fmt: skip
    assert "had not settled after 9.0 GB: it may fall further" in describe(drive)


def test_rates_of_several_drives_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: type[Bench]
) -> None:
    paths = [str(tmp_path / name) for name in ("[red]", "b")]
    for path in paths:
        Path(path).mkdir()
    out, _ = ran(capsys, *paths)
    assert all(f"writes to {path}" in out for path in paths)
    assert "--drive-read 6.00 --drive-write 1.00 --drive-mixed 1.60" in out


def test_a_drive_without_room_for_one_interval_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: type[Bench]
) -> None:
    bench.room_bytes = WRITES
    assert main(["volume", "bench", "--sustained", "--seconds", "9", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "less than one interval" in error
    assert "--share" in error


def test_the_curve_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: type[Bench]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.svg"
    ran(capsys, "--plot", str(picture), str(tmp_path))
    assert "GB written" in picture.read_text()
    assert "cache 1 GB" in picture.read_text()


def test_without_matplotlib_nothing_is_written_to_the_drive(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    bench: type[Bench],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["volume", "bench", "--sustained", "--plot", "x.png", str(tmp_path)]
    assert main(arguments) == 1
    assert "pip install 'memascend[plot]'" in capsys.readouterr().err
    assert not hasattr(bench, "load")
