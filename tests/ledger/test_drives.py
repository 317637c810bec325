"""SMART data: what drives say, and that no run fails over it."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from memascend.cli import doctor
from memascend.config.block import parse_block
from memascend.ledger import drives as smart
from memascend.ledger.drives import DriveReport, DriveWatch, DriveWear, parse, read_drives

SAMPLES = Path(__file__).parent / "smart"
TB = 10**12


def sample(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SAMPLES / f"{name}.json").read_text())
    return found


# -- what a drive says ---------------------------------------------------------------------------


def test_an_nvme_drive_says_what_is_used_and_written() -> None:
    drive = parse("nvme0n1", sample("nvme"))
    assert isinstance(drive, DriveWear)
    assert (drive.model, drive.used_percent) == ("Example 2TB", 4)
    assert drive.life_written_bytes == 100_000_000 * 512_000
    assert drive.left_bytes == drive.life_written_bytes * 96 // 4
    assert drive.days_left is None
    assert drive.describe() == (
        "nvme0n1 (Example 2TB): 4 % of its endurance used, 51.2 TB written in its life, "
        "about 1229 TB left"
    )


def test_an_ata_drive_says_it_in_attributes() -> None:
    drive = parse("sda", sample("ata"))
    assert isinstance(drive, DriveWear)
    assert (drive.used_percent, drive.life_written_bytes) == (10, 200_000_000_000 * 512)


@pytest.mark.parametrize(
    ("row", "used", "written"),
    [
        ({"name": "Percent_Lifetime_Remain", "value": 93, "raw": {"value": 7}}, 7, None),
        ({"name": "SSD_Life_Left", "value": 100, "raw": {"value": 0}}, 0, None),
        ({"name": "Media_Wearout_Indicator", "value": 200, "raw": {"value": 5}}, None, None),
        ({"name": "Host_Writes_32MiB", "value": 1, "raw": {"value": 3}}, None, 96 << 20),
        ({"name": "Lifetime_Writes_GiB", "value": 1, "raw": {"value": 3}}, None, 3 << 30),
        ({"name": "Total_LBAs_Written", "value": 1, "raw": {"value": 3}}, None, 3 * 4096),
        ({"name": "Total_LBAs_Written", "value": 1, "raw": {"value": "3"}}, None, None),
        ({"name": ["Total_LBAs_Written"]}, None, None),
        ("no object", None, None),
    ],
)
def test_attributes_of_several_makers(row: Any, used: int | None, written: int | None) -> None:
    answer = {"logical_block_size": 4096, "ata_smart_attributes": {"table": [row]}}
    drive = parse("sda", answer)
    if used is None and written is None:
        assert drive == "its SMART data has neither the endurance used nor the bytes written"
    else:
        assert drive == DriveWear("sda", "", used, written)


def test_a_newer_smartctl_says_the_share_by_itself() -> None:
    assert parse("sda", {"endurance_used": {"current_percent": 5}}) == DriveWear("sda", "", 5)


def test_a_drive_that_may_not_be_asked_says_why() -> None:
    reason = "Smartctl open device: /dev/nvme0n1 failed: Permission denied"
    assert parse("nvme0n1", sample("refused"), status=2) == reason
    assert parse("nvme0n1", {}, status=1) == "smartctl ended with status 1"


@pytest.mark.parametrize(
    "answer",
    [
        {"nvme_smart_health_information_log": 5},
        {"nvme_smart_health_information_log": {"percentage_used": -1}},
        {"nvme_smart_health_information_log": {"percentage_used": True}},
        {"ata_smart_attributes": {"table": {"name": 5}}},
        {"smartctl": {"messages": [5, {"string": 7}]}},
        {"smartctl": {"messages": 7}, "model_name": 3},
    ],
)
def test_a_damaged_answer_is_a_drive_without_data(answer: dict[str, Any]) -> None:
    assert isinstance(parse("nvme0n1", answer), str)


# -- what is left --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "left"), [(0, None), (1, None), (2, 49 * TB), (50, TB), (100, 0), (120, 0)]
)
def test_what_is_left_follows_from_what_used_it_up(used: int, left: int | None) -> None:
    assert DriveWear("nvme0n1", "", used, TB).left_bytes == left


def test_the_days_left_are_those_at_what_the_drive_was_written_meanwhile() -> None:
    seconds = [0.0]
    readings = [
        DriveReport((DriveWear("a", "", 10, 9 * TB), DriveWear("b", "", 10))),
        DriveReport(
            (DriveWear("a", "", 10, 10 * TB), DriveWear("b", "", 10), DriveWear("c", "", 1))
        ),
    ]
    watch = DriveWatch(["/x"], read=lambda paths: readings.pop(0), clock=lambda: seconds[0])
    assert [drive.days_left for drive in watch.drives] == [None, None]
    seconds[0] = 86_400.0
    watch.end()
    first, *others = watch.drives
    assert first.run_written_bytes == TB
    assert first.days_left == pytest.approx(90)
    assert first.describe().endswith("90 days at this rate")
    assert [drive.days_left for drive in others] == [None, None]
    assert first.as_dict()["left_bytes"] == 90 * TB


def test_a_run_of_seconds_has_no_rate() -> None:
    drive = DriveWear("a", "", 10, TB, run_written_bytes=5, run_seconds=59.0)
    assert drive.left_bytes is not None
    assert drive.days_left is None


def test_drives_that_said_nothing_are_not_asked_again() -> None:
    asked: list[list[str]] = []

    def read(paths: list[str]) -> DriveReport:
        asked.append(paths)
        return DriveReport(silent={"sda": "no"})

    watch = DriveWatch([Path("/x")], read=read)
    watch.end()
    assert asked == [["/x"]]
    assert watch.start.why_silent() == "sda: no"


# -- asking --------------------------------------------------------------------------------------


@pytest.fixture
def smartctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a program in the place of smartctl, and drives below every path."""

    def install(script: str, *names: str) -> None:
        program = tmp_path / "smartctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(smart.shutil, "which", lambda *_, **__: str(program))
        monkeypatch.setattr(smart, "drives_below", lambda path: list(names))

    return install


def test_each_drive_is_asked_once(smartctl: Any, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    smartctl(f'echo "$@" >> {calls}; cat {SAMPLES}/nvme.json', "nvme1n1", "nvme0n1")
    reading = read_drives(["/a", "/b"])
    assert [drive.name for drive in reading.drives] == ["nvme0n1", "nvme1n1"]
    assert sorted(calls.read_text().splitlines()) == ["-j -a /dev/nvme0n1", "-j -a /dev/nvme1n1"]
    assert reading.why_silent() == ""


def test_a_status_with_warnings_does_not_matter(smartctl: Any) -> None:
    smartctl(f"cat {SAMPLES}/ata.json; exit 64", "sda")
    assert [drive.used_percent for drive in read_drives(["/a"]).drives] == [10]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"cat {SAMPLES}/refused.json; exit 2", "Permission denied"),
        ("echo usage; exit 1", "status 1 and no JSON"),
        ("echo '[1]'", "no JSON"),
    ],
)
def test_whatever_smartctl_does_is_a_reason(smartctl: Any, script: str, reason: str) -> None:
    smartctl(script, "sda")
    reading = read_drives(["/a"])
    assert reading.drives == ()
    assert reason in reading.silent["sda"]


def test_a_drive_that_hangs_is_not_waited_for(
    smartctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smart, "SMARTCTL_TIMEOUT_S", 0.2)
    smartctl("exec sleep 30", "sda", "sdb")
    began = time.monotonic()
    reading = read_drives(["/a"])
    assert time.monotonic() - began < 25  # of the 30 s that each would take
    assert all("no answer within 0.2 s" in reason for reason in reading.silent.values())
    assert list(reading.silent) == ["sda", "sdb"]


def test_a_drive_that_hangs_does_not_silence_the_others(
    smartctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smart, "SMARTCTL_TIMEOUT_S", 5.0)  # in which the other must answer
    script = f'case "$3" in */sda) exec sleep 30;; esac; cat {SAMPLES}/nvme.json'
    smartctl(script, "sda", "sdb")
    reading = read_drives(["/a"])
    assert list(reading.silent) == ["sda"]
    assert [drive.name for drive in reading.drives] == ["sdb"]


def test_without_smartctl_or_drives_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smart.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(smart, "drives_below", lambda path: ["sda"] * (path == "/a"))
    assert read_drives(["/a"]).silent == {"sda": smart.NO_SMARTCTL}
    assert read_drives(["/b"]).why_silent() == "drives: none was found below the volumes"


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    reading = read_drives([tmp_path])
    assert bool(reading.drives) or bool(reading.silent)


# -- who shows it --------------------------------------------------------------------------------


def test_doctor_shows_each_drive(smartctl: Any, tmp_path: Path) -> None:
    smartctl(f"cat {SAMPLES}/nvme.json", "nvme0n1")
    check = doctor._wear(tmp_path)
    assert (check.state, check.fix) == ("ok", "")
    assert "4 % of its endurance used" in check.found


def test_doctor_says_that_a_drive_is_worn(smartctl: Any, tmp_path: Path) -> None:
    smartctl(f'sed \'s/"value": 90/"value": 15/\' {SAMPLES}/ata.json', "sda")
    check = doctor._wear(tmp_path)
    assert check.state == "note"
    assert "85 % of its endurance used" in check.found
    assert "new drive" in check.fix


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smart.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(smart, "drives_below", lambda path: ["sda"])
    check = doctor._wear(tmp_path)
    assert check.state == "note"
    assert "smartmontools" in check.fix


def test_the_ledger_ends_with_what_drives_say(tmp_path: Path) -> None:
    from memascend.ledger.ledger import Ledger

    drive = DriveWear("nvme0n1", "Example", 4, TB, 5 * TB, 86_400.0)
    ledger = Ledger((), None, 0, 0, 0, 0, {}, drives=(drive,))
    assert ledger.describe().splitlines()[-1] == f"  drive {drive.describe()}"
    ledger.write(tmp_path / "report.json")
    (written,) = json.loads((tmp_path / "report.json").read_text())["drives"]
    assert (written["name"], written["used_percent"]) == ("nvme0n1", 4)
    assert written["days_left"] == pytest.approx(24 / 5)


def test_a_run_says_once_that_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("deepspeed")
    from memascend.deepspeed.attach import attach as activation

    monkeypatch.setattr(
        smart, "read_drives", lambda paths: DriveReport(silent={"sda": "no rights"})
    )
    with caplog.at_level(logging.INFO):
        watch = activation._watch_drives(parse_block({}), "/drive")
        watch.end()
    assert [record.getMessage() for record in caplog.records] == [
        "memascend: no SMART data of sda: no rights"
    ]
