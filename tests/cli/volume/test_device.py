"""`memascend volume format`, `show` and `wipe`: what they ask, print and refuse."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memascend.cli.main import main
from memascend.volumes.device import looked_at
from memascend.volumes.header import Header
from tests.support.loop_devices import loop_device, run

pytestmark = pytest.mark.root


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    with loop_device(tmp_path) as path:
        yield path


def header(path: str) -> Header | None:
    with looked_at(path) as device:
        return device.header()


def volume(*words: str) -> int:
    return main(["volume", *words])


def test_without_a_terminal_nothing_is_destroyed(device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{device}\n"))
    assert volume("format", device) == 1
    assert "--yes in a script" in capsys.readouterr().err
    assert header(device) is None


def test_the_devices_name_has_to_be_typed(device, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    assert volume("format", device) == 1
    assert header(device) is None
    monkeypatch.setattr(sys, "stdin", Terminal(f"{device}\n"))
    assert volume("format", device) == 0
    assert header(device) is not None
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    assert volume("wipe", device) == 1
    assert header(device) is not None
    assert "Nothing was changed" in capsys.readouterr().out


def test_format_show_wipe(device, capsys):
    assert volume("format", "--yes", "--owner", "1234", device) == 0
    printed = capsys.readouterr().out
    assert json.dumps({"volumes": [{"path": device, "raw": True}]}) in printed
    assert volume("show", "--json", device) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["header"]["owner_uid"] == 1234
    assert (shown["users"], shown["signatures"], shown["problem"]) == ([], [], "")
    assert volume("show", device) == 0
    assert "a raw volume of memascend" in capsys.readouterr().out
    assert volume("wipe", "--yes", device) == 0
    assert volume("show", device) == 0
    assert "nothing that is recognised" in capsys.readouterr().out
    assert volume("wipe", "--yes", device) == 1
    assert "no header of memascend" in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_alone(device, monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert volume("format", "--yes", device) == 0
    assert volume("wipe", "--yes", device) == 0
    shown = capsys.readouterr().err
    assert [f"{verb} {device}" in shown for verb in ("formatting", "wiping")] == [is_terminal] * 2
    assert is_terminal or shown == ""


def test_the_owner_is_who_called_sudo(device, monkeypatch):
    monkeypatch.setenv("SUDO_UID", "1001")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert volume("format", "--yes", device) == 0
    found = header(device)
    assert found is not None
    assert found.owner_uid == 1001


def test_a_file_system_is_never_formatted_over(device, capsys):
    run("mkfs.ext4", "-q", "-F", device)
    assert volume("format", "--yes", device) == 1
    assert "ext4" in capsys.readouterr().err
    assert volume("show", device) == 0
    assert "carries an ext2, ext3 or ext4 file system" in capsys.readouterr().out


def test_a_damaged_header_is_a_problem(device, capsys):
    assert volume("format", "--yes", device) == 0
    with open(device, "r+b") as file:
        file.seek(30)
        file.write(b"x")
    assert volume("show", device) == 1
    assert "checksum" in capsys.readouterr().out


def test_an_owner_that_is_none_is_a_mistake(device, capsys):
    assert volume("format", "--yes", "--owner", "-1", device) == 2
    assert header(device) is None


def test_a_formatted_device_can_be_measured(device, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert volume("format", "--yes", device) == 0
    before = header(device)
    capsys.readouterr()
    words = ["--seconds", "0.02", "--span", "16MiB", "--chunk", "64KiB", "--depth", "2", "--json"]
    assert volume("bench", *words, device) == 0
    [drive] = json.loads(capsys.readouterr().out)["drives"]
    assert drive["read"] > 0
    assert header(device) == before


def test_the_doctor_and_the_plan_look_at_a_device(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drive = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": drive, "offload_optimizer": drive}
    block = {"volumes": [{"path": device, "raw": True}]}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": zero, "memascend": block}))

    def checked() -> dict[str, str]:
        main(["doctor", "--json", "--config", str(config)])
        checks = json.loads(capsys.readouterr().out)["checks"]
        (found,) = (check for check in checks if check["name"] == "raw volume")
        return dict(found)

    found = checked()
    assert found["found"].startswith(f"cannot use {device} as a raw volume")
    assert f"memascend volume format {device}" in found["fix"]
    assert volume("format", device, "--yes") == 0
    capsys.readouterr()
    assert checked()["state"] == "ok"
    assert main(["plan", "Qwen3-0.6B", "--config", str(config)]) == 0
    assert f"of 128.00 MiB free in {device}" in " ".join(capsys.readouterr().out.split())
