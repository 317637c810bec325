"""Free space of the volumes that a plan is for."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.cli.plan_machine import Machine, read_machine
from memascend.config.volumes import VolumeConfig
from memascend.errors import ConfigError

STATED = {"world": 1, "nodes": 1, "host_memory": "8GiB", "device_memory": "8GiB"}


def machine(*volumes: dict[str, Any], drive_space: str | None = None) -> Machine:
    args = Namespace(**STATED, path=None, drive_space=drive_space)
    return read_machine(args, [VolumeConfig(**volume) for volume in volumes])


def test_folders_of_one_file_system_share_its_free_space(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    found = machine({"path": str(tmp_path)}, {"path": str(tmp_path / "new" / "run")})
    assert found.free_bytes == pytest.approx(free_bytes, rel=0.02)
    assert found.place == str(tmp_path)


def test_a_capacity_is_all_that_a_volume_may_use(tmp_path: Path) -> None:
    volumes = [{"path": str(tmp_path / name), "capacity": 2 << 20} for name in ("a", "b")]
    assert machine(*volumes).free_bytes == 4 << 20
    free_bytes = shutil.disk_usage(tmp_path).free
    found = machine(volumes[0], {"path": str(tmp_path)})
    assert found.free_bytes == pytest.approx(free_bytes, rel=0.02)
    huge = machine({"path": str(tmp_path), "capacity": 1 << 59})
    assert huge.free_bytes == pytest.approx(free_bytes, rel=0.02)


@pytest.mark.parametrize("path", ["/etc/hosts", "/etc/hosts/a", "/dev/null", "/dev/nosuch"])
def test_a_path_that_can_be_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path} cannot be a folder on a drive"):
        machine({"path": str(tmp_path)}, {"path": path})
    assert machine({"path": path}, drive_space="1GiB").free_bytes == GIB  # of another machine


def test_the_space_of_a_device_that_is_not_here_is_not_known(tmp_path: Path) -> None:
    assert machine({"path": "/dev/nosuch", "raw": True}).free_bytes is None
    with pytest.raises(ConfigError, match="is no block device"):
        machine({"path": str(tmp_path), "raw": True})
