"""Measurements that are kept: by which name a drive is known, and that a bad file does no harm."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memascend.volumes import kept
from memascend.volumes.kept import (
    RATES_FILE,
    KeptRates,
    identity,
    keep_rates,
    kept_rates,
    read_kept,
    write_kept,
)


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that begin with the same letter are on one drive."""
    monkeypatch.setattr(kept, "identity", lambda path: path[0])


def test_rates_are_known_by_the_drive_and_those_of_several_add_up(
    tmp_path: Path, drives: None
) -> None:
    cache = tmp_path / "cache"
    keep_rates("a1", KeptRates(9.0, 9.0, 9.0), cache=cache)
    keep_rates("a1", KeptRates(3.0, 1.0, 1.5), cache=cache)
    keep_rates("b1", KeptRates(2.0, 0.5, 1.0), cache=cache)
    assert kept_rates(["a2"], cache=cache) == KeptRates(3.0, 1.0, 1.5)
    assert kept_rates(["a2"], cache=cache).day == date.today()  # type: ignore[union-attr]
    assert kept_rates(["a1", "a2"], cache=cache) == KeptRates(3.0, 1.0, 1.5)
    assert kept_rates(["a1", "b1"], cache=cache) == KeptRates(5.0, 1.5, 2.5)
    assert kept_rates(["a1"], cache=cache, name="other.json") is None
    keep_rates("a1", KeptRates(7.0, 7.0, 7.0), cache=cache, name="other.json")
    assert kept_rates(["a2"], cache=cache) == KeptRates(3.0, 1.0, 1.5)
    assert kept_rates(["a2"], cache=cache, name="other.json") == KeptRates(7.0, 7.0, 7.0)
    assert (cache / RATES_FILE).stat().st_mode & 0o777 == 0o600


def test_without_a_measurement_of_every_drive_nothing_is_known(
    tmp_path: Path, drives: None
) -> None:
    keep_rates("a", KeptRates(3.0, 1.0, 1.5), cache=tmp_path)
    write_kept(tmp_path / RATES_FILE, read_kept(tmp_path / RATES_FILE) | {"c": [1.0]})
    for paths in ([], ["b"], ["a", "b"], ["c"]):
        assert kept_rates(paths, cache=tmp_path) is None


def test_rates_of_several_drives_are_as_old_as_the_first_of_them(
    tmp_path: Path, drives: None
) -> None:
    old = date(2026, 1, 31)
    keep_rates("a", KeptRates(3.0, 1.0, 1.5), cache=tmp_path)
    entry = [2.0, 0.5, 1.0, old.toordinal()]
    write_kept(tmp_path / RATES_FILE, read_kept(tmp_path / RATES_FILE) | {"b": entry})
    found = kept_rates(["a", "b"], cache=tmp_path)
    assert found is not None
    assert (found, found.day) == (KeptRates(5.0, 1.5, 2.5), old)


def test_a_path_of_another_machine_has_no_rates(tmp_path: Path) -> None:
    assert kept_rates([str(tmp_path / "none")], cache=tmp_path) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, drives: None) -> None:
    (tmp_path / "file").touch()
    keep_rates("a", KeptRates(3.0, 1.0, 1.5), cache=tmp_path / "file")
    assert kept_rates(["a"], cache=tmp_path / "file") is None


@given(st.binary(max_size=200))
def test_no_content_of_the_cache_is_an_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    assert isinstance(read_kept(path), dict)


def test_a_partition_is_known_by_the_serial_of_its_drive(tmp_path):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    drive = tmp_path / "devices/pci/nvme0n1"
    (drive / "nvme0n1p1").mkdir(parents=True)
    (drive / "device").mkdir()
    (drive / "device/serial").write_text("S4EVNX0R  \n")
    (drive / "nvme0n1p1/size").write_text("4096\n")
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block" / number).symlink_to(drive / "nvme0n1p1")
    assert identity(str(tmp_path), tmp_path) == "serial S4EVNX0R, 4096 sectors"
    assert "bytes" in identity(str(tmp_path), Path("/nowhere"))
