"""A drive is held to a stated rate as long as that is asked for, and not longer."""

from __future__ import annotations

import os
import re
from pathlib import Path

import drive_rate
import pytest

from memascend.system.mounts import drives_below

GROUP = f"**/memascend-bench-{os.getpid()}"


def own_groups() -> str:
    return Path("/proc/self/cgroup").read_text()


def test_a_drive_has_the_rate_while_it_is_asked_for(tmp_path: Path) -> None:
    if not drives_below(tmp_path):
        pytest.skip(f"{tmp_path} is on no drive")
    before = own_groups()
    try:
        with drive_rate.drive_rate(tmp_path, (1.5, 0.5)):
            (group,) = drive_rate.GROUPS.glob(GROUP)
            assert before != own_groups()
            limits = "".join(path.read_text() for path in group.glob("*") if is_limit(path))
            assert sorted(re.findall(r"[ =](\d+)\b", limits)) == ["1500000000", "500000000"]
    except RuntimeError as error:
        # Containers may have control groups that they must not write, or no say about the drive.
        if "no control group" not in str(error) and "takes no rate" not in str(error):
            raise
        pytest.skip(str(error))
    assert own_groups() == before
    assert list(drive_rate.GROUPS.glob(GROUP)) == []


def is_limit(path: Path) -> bool:
    return path.name.endswith("bps_device") or path.name == "io.max"


def test_both_versions_of_control_groups_are_told_bytes_per_second() -> None:
    assert drive_rate._limits(Path("/cgroup/blkio/bench"), "259:0", 2, 1) == [
        ("blkio.throttle.read_bps_device", "259:0 2"),
        ("blkio.throttle.write_bps_device", "259:0 1"),
    ]
    newer = drive_rate._limits(Path("/cgroup/bench"), "259:0", 2, 1)
    assert newer == [("io.max", "259:0 rbps=2 wbps=1")]


@pytest.mark.parametrize("rates", [(0, 1), (1, -1), (float("nan"), 1)])
def test_a_rate_is_above_nothing(rates: tuple[float, float], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="above 0"), drive_rate.drive_rate(tmp_path, rates):
        pass


def test_without_a_rate_nothing_changes(tmp_path: Path) -> None:
    before = own_groups()
    with drive_rate.drive_rate(tmp_path, None):
        assert own_groups() == before


def test_what_is_on_no_drive_has_no_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(drive_rate, "drives_below", lambda path: [])
    monkeypatch.setattr(drive_rate, "_new_group", lambda: new_group(tmp_path))
    monkeypatch.setattr(drive_rate, "_own_group", lambda root: tmp_path)
    monkeypatch.setattr(drive_rate, "_join", lambda group: None)
    with pytest.raises(RuntimeError, match="on no drive"), drive_rate.drive_rate(tmp_path, (1, 1)):
        pass
    assert not (tmp_path / "group").exists()


def new_group(folder: Path) -> Path:
    (folder / "group").mkdir()
    return folder / "group"
