"""Sizes that options state, and the folder that stands for one that a run would make."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from memascend.base.units import GIB
from memascend.cli.plan_sizes import device_bytes_of, drive_space_of, existing, host_bytes_of

OF = {
    "device_memory": device_bytes_of,
    "host_memory": host_bytes_of,
    "drive_space": drive_space_of,
}


@pytest.mark.parametrize("name", OF)
def test_a_size_is_one_or_none(name: str) -> None:
    assert OF[name](Namespace(**{name: "24GiB"})) == 24 * GIB
    assert OF[name](Namespace(**{name: None})) is None


def test_a_missing_folder_is_on_the_drive_of_the_nearest_one_above_it(tmp_path: Path) -> None:
    assert existing(str(tmp_path)) == str(tmp_path)
    assert existing(str(tmp_path / "swap" / "run")) == str(tmp_path)
    assert existing("/dev/nosuch") == "/dev/nosuch"
    assert existing("/dev/shm/nosuch") == "/dev/shm"
