"""`memascend plan --path`: a short measurement of the drive, which is used again."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from memascend.cli import plan_drive
from memascend.cli.main import main
from memascend.cli.plan_drive import measure, short_rates
from memascend.config.environment import cache_directory
from memascend.errors import StoreError
from memascend.plan.drive_rates import WRITE_GB_S
from memascend.volumes.kept import SHORT_RATES_FILE, KeptRates, keep_rates, kept_rates
from tests.support.planned import as_json


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(monkeypatch: pytest.MonkeyPatch, rates: KeptRates) -> list[Path]:
    """Have every measurement give these rates; return the folders that were measured."""
    folders: list[Path] = []

    def stand_in(path: Path) -> KeptRates:
        folders.append(path)
        return rates

    monkeypatch.setattr(plan_drive, "measure", stand_in)
    return folders


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    """Return the plan as JSON, and the notes of the same command in one line."""
    found = as_json(capsys, "Llama-3.1-8B", *options)
    assert main(["plan", "Llama-3.1-8B", "--verbose", *options]) == 0
    return found, " ".join(capsys.readouterr().out.split())


def test_a_drive_is_measured_once_and_only_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = measured(monkeypatch, KeptRates(2.0, 0.5, 0.75))
    planned(capsys)
    assert folders == []
    when = f" on {date.today()}"
    for _ in range(2):
        found, notes = planned(capsys, "--path", str(tmp_path))
        rates = [found[f"drive_{name}_gb_s"] for name in ("read", "write", "mixed")]
        assert rates == [2.0, 0.5, 0.75]
        assert f"measured for some seconds on {tmp_path}{when}" in notes
        assert f"0.5 written (measured{when})" in notes
    assert folders == [tmp_path]


def test_fast_writes_may_be_those_of_a_cache_and_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, KeptRates(6.5, 5.0, 6.0))
    found, notes = planned(capsys, "--path", str(tmp_path))
    assert found["drive_read_gb_s"] == 6.5
    assert found["drive_write_gb_s"] == WRITE_GB_S
    assert f"writes are counted at {WRITE_GB_S:g} of 5 GB/s" in notes
    assert f"{WRITE_GB_S:g} written (writes assumed)" in notes


def test_stated_and_sustained_rates_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = measured(monkeypatch, KeptRates(6.5, 0.1, 0.2))
    path = ("--path", str(tmp_path))
    found, _ = planned(capsys, *path, "--drive-write", "2")
    assert (found["drive_read_gb_s"], found["drive_write_gb_s"]) == (3.0, 2.0)
    keep_rates(str(tmp_path), KeptRates(4.0, 1.5, 2.0), cache=cache_directory())
    found, _ = planned(capsys, *path)
    assert (found["drive_read_gb_s"], found["drive_write_gb_s"]) == (4.0, 1.5)
    assert folders == []


def test_a_drive_that_cannot_be_measured_has_the_assumed_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> KeptRates:
        raise StoreError(28, "no room")

    monkeypatch.setattr(plan_drive, "measure", fail)
    assert main(["plan", "Llama-3.1-8B", "--path", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "not measured" in printed.err
    assert "no room" in printed.err
    assert "3 GB/s read, 0.8 written (assumed)" in " ".join(printed.out.split())


def test_memory_and_a_missing_folder_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = measured(monkeypatch, KeptRates(6.5, 5.0, 6.0))
    monkeypatch.setattr(plan_drive, "filesystem_of", lambda path: "tmpfs")
    assert short_rates(tmp_path) is None
    monkeypatch.undo()
    assert short_rates(tmp_path / "missing") is None
    assert folders == []


def test_the_measurement_leaves_nothing_on_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_drive, "SECONDS", 0.02)
    monkeypatch.setattr(plan_drive, "SPAN_BYTES", 16 << 20)
    folder = tmp_path / "drive"
    folder.mkdir()
    rates = measure(folder)
    assert min(rates.read_gb_s, rates.write_gb_s, rates.mixed_gb_s) > 0
    assert list(folder.iterdir()) == []
    assert kept_rates([str(folder)], cache=cache_directory(), name=SHORT_RATES_FILE) is None


def test_a_short_measurement_counts_also_for_a_config_that_names_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(monkeypatch, KeptRates(2.0, 0.5, 0.75))
    planned(capsys, "--path", str(tmp_path))
    config = tmp_path / "ds.json"
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    found, notes = planned(capsys, "--config", str(config))
    assert (found["drive_read_gb_s"], found["drive_write_gb_s"]) == (2.0, 0.5)
    assert "measured for some seconds" in notes
