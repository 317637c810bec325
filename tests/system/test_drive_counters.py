"""The kernel's counters of drives, from files as it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from memascend.system import drive_counters as module
from memascend.system.drive_counters import DriveCounters, drives_of, read_counters

# A line of a 6.1 kernel; the fields are in Documentation/block/stat.rst.
LINE = " 3066120 851425 2000 8253247 2039761 748218 3000 2307243 0 1500 10653846 0 0 0 0 16619 1402"


def sysfs_with(folder: Path, line: str) -> Path:
    drive = folder / "class/block/nvme0n1"
    drive.mkdir(parents=True)
    (drive / "stat").write_text(line)
    return folder


def test_sectors_and_milliseconds_become_bytes_and_seconds(tmp_path: Path) -> None:
    found = read_counters("nvme0n1", sysfs_with(tmp_path, LINE))
    assert found == DriveCounters(read_bytes=1_024_000, written_bytes=1_536_000, busy_s=1.5)


@pytest.mark.parametrize("line", ["", "1 2 3", LINE.replace("2000", "-1"), "x " * 17])
def test_what_is_no_such_line_is_no_counter(tmp_path: Path, line: str) -> None:
    assert read_counters("nvme0n1", sysfs_with(tmp_path, line)) is None


def test_a_drive_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert read_counters("nvme0n1", tmp_path) is None


def test_drives_are_found_below_folders_that_a_run_makes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def below(path: Path) -> list[str]:
        asked.append(path)
        return ["sdb", "sda"]

    monkeypatch.setattr(module, "drives_below", below)
    assert drives_of([tmp_path / "not" / "yet", tmp_path]) == ["sda", "sdb"]
    assert asked == [tmp_path, tmp_path]
