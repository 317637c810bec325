"""From a path to its mount, its block device and its drives, in a made-up sysfs and procfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memascend.system.mounts import Mount, drives_below, filesystem_of, mount_of, read_mounts


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A partition of nvme0n1, and an LVM volume over it and over an md of two disks."""
    root = tmp_path / "sys"
    devices = root / "devices"
    for name in ("nvme0n1/nvme0n1p2", "sda", "sdb", "md0", "dm-0"):
        (devices / name).mkdir(parents=True)
    (devices / "nvme0n1/nvme0n1p2/partition").write_text("2\n")
    (root / "class/block").mkdir(parents=True)
    (root / "dev/block").mkdir(parents=True)
    for parent, parts in {"md0": ["sda", "sdb"], "dm-0": ["nvme0n1/nvme0n1p2", "md0"]}.items():
        (devices / parent / "slaves").mkdir()
        for part in parts:
            link = devices / parent / "slaves" / Path(part).name
            link.symlink_to(devices / part)
    for name in ("nvme0n1", "nvme0n1/nvme0n1p2", "sda", "sdb", "md0", "dm-0"):
        (devices / name / "dev").write_text("1:1\n")
        (root / "class/block" / Path(name).name).symlink_to(devices / name)
    return root


@pytest.mark.parametrize(
    ("device", "drives"),
    [
        ("nvme0n1", ["nvme0n1"]),
        ("nvme0n1/nvme0n1p2", ["nvme0n1"]),
        ("md0", ["sda", "sdb"]),
        ("dm-0", ["nvme0n1", "sda", "sdb"]),
    ],
)
def test_a_folder_leads_to_its_drives(
    device: str, drives: list[str], sysfs: Path, tmp_path: Path
) -> None:
    number = tmp_path.stat().st_dev
    link = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to(sysfs / "devices" / device)
    assert drives_below(tmp_path, sysfs) == drives


def test_a_file_system_with_a_number_of_its_own_leads_to_what_it_was_mounted_from(
    sysfs: Path, tmp_path: Path
) -> None:
    mounts = tmp_path / "self/mountinfo"
    mounts.parent.mkdir()
    blank = str(tmp_path).replace(" ", "\\040")
    lines = ["1 1 0:1 / / rw - btrfs /dev/sdb rw", f"1 1 0:2 / {blank} rw shared:1 - btrfs {{}} rw"]
    text = "\n".join([*lines, "a line of another kind", ""])
    mounts.write_text(text.format("/dev/nvme0n1p2"))
    assert drives_below(tmp_path, sysfs, tmp_path) == ["nvme0n1"]
    mounts.write_text(text.format("server:/export"))
    assert drives_below(tmp_path, sysfs, tmp_path) == []


def test_what_is_on_no_drive_has_none(sysfs: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert drives_below(tmp_path, sysfs, missing) == []
    assert drives_below(missing, sysfs) == []


def test_every_escape_of_the_kernel_is_undone(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        "1 1 259:1 / /a\\040b\\011c\\134040 rw shared:1 - ext4 /dev/x\\040y rw\n"
    )
    assert read_mounts(tmp_path) == [Mount("259:1", "/a b\tc\\040", "ext4", "/dev/x y")]


def test_the_last_mount_over_a_folder_counts(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    point = str(tmp_path).replace(" ", "\\040")
    (tmp_path / "self/mountinfo").write_text(
        f"1 1 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {point} rw - xfs /dev/b rw\n"
        f"3 1 0:3 / {point} rw - btrfs /dev/c rw\n"
    )
    mount = mount_of(tmp_path, tmp_path)
    assert mount is not None
    assert mount.source == "/dev/c"


def test_the_kind_of_a_real_file_system_is_found() -> None:
    assert filesystem_of("/proc") == "proc"
