"""fio as a yardstick: the same load in its words, and what it prints or fails with."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from memascend import _core
from memascend.base.units import MIB
from memascend.cli.volume import fio
from memascend.errors import StoreError
from memascend.volumes.speed import Load, Mode

LOAD = Load(chunk_bytes=MIB, queue_depth=32, span_bytes=64 * MIB)
JOB = {"read": {"bw_bytes": 1000000000}, "write": {"bw_bytes": 500000000}}


def stand_in(folder: Path, body: str) -> str:
    program = folder / "fio"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o700)
    return str(program)


def run(program: str, volume: _core.VolumeOptions, mode: Mode = "read") -> float:
    return fio.run(program, volume, mode=mode, load=LOAD, engine="uring", seconds=0.1)


@pytest.fixture
def drive(tmp_path: Path) -> _core.VolumeOptions:
    folder = tmp_path / "drive"
    folder.mkdir()
    return _core.VolumeOptions(str(folder))


@pytest.mark.parametrize(
    ("mode", "pattern"), [("read", "read"), ("write", "write"), ("mixed", "rw")]
)
def test_fio_gets_the_same_load_on_a_file_of_its_own(
    tmp_path: Path, drive: _core.VolumeOptions, mode: Mode, pattern: str
) -> None:
    log = tmp_path / "log"
    answer = json.dumps({"jobs": [JOB]})
    program = stand_in(tmp_path, f"echo \"$@\" > {log}\necho 'a warning'\necho '{answer}'")
    assert run(program, drive, mode) == 1.5e9
    words = log.read_text().split()
    for word in (
        "--bs=1048576",
        "--iodepth=32",
        "--size=67108864",
        "--direct=1",
        f"--rw={pattern}",
    ):
        assert word in words
    [file] = [word.partition("=")[2] for word in words if word.startswith("--filename=")]
    assert Path(file).parent == Path(drive.path)
    assert list(Path(drive.path).iterdir()) == []


def test_of_a_device_fio_gets_only_what_is_ours(tmp_path: Path) -> None:
    log = tmp_path / "log"
    answer = json.dumps({"jobs": [JOB]})
    program = stand_in(tmp_path, f"echo \"$@\" > {log}\necho '{answer}'")
    device = tmp_path / "device"
    device.touch()
    with device.open("rb") as opened:
        volume = _core.VolumeOptions(
            str(device), descriptor=opened.fileno(), start_bytes=MIB, capacity_bytes=16 * MIB
        )
        run(program, volume)
    words = log.read_text().split()
    assert f"--filename={device}" in words
    assert f"--offset={MIB}" in words
    assert f"--size={16 * MIB}" in words


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("echo no space >&2; exit 1", "no space"),
        ("echo on stdout; exit 1", "on stdout"),
        ("echo nothing", "cannot read"),
        ("echo '{}'", "cannot read"),
        ("echo '{\"jobs\": []}'", "cannot read"),
        ('echo \'{"jobs": [{"read": 1}]}\'', "cannot read"),
    ],
)
def test_a_failing_fio_is_an_error_with_its_own_words(
    tmp_path: Path, drive: _core.VolumeOptions, body: str, named: str
) -> None:
    with pytest.raises(StoreError, match=f"fio.*{named}"):
        run(stand_in(tmp_path, body), drive)
    assert list(Path(drive.path).iterdir()) == []


def test_a_fio_that_cannot_be_started_is_an_error(drive: _core.VolumeOptions) -> None:
    with pytest.raises(StoreError, match="No such file"):
        run("/none/fio", drive)


def test_a_fio_that_never_ends_is_an_error(
    drive: _core.VolumeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_ends(line: list[str], *, timeout: float, **_: object) -> None:
        raise fio.subprocess.TimeoutExpired(line, timeout)

    monkeypatch.setattr(fio.subprocess, "run", never_ends)
    with pytest.raises(StoreError, match="timed out"):
        run("fio", drive)


@pytest.mark.parametrize(("engine", "name"), [("uring", "io_uring"), ("threads", "libaio")])
def test_fio_is_told_names_engines_and_seconds_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, name: str
) -> None:
    lines: list[list[str]] = []

    def note(line: list[str], **_: object) -> SimpleNamespace:
        lines.append(line)
        return SimpleNamespace(returncode=0, stdout=json.dumps({"jobs": [JOB]}))

    monkeypatch.setattr(fio.subprocess, "run", note)
    folder = tmp_path / "a:b\\c"
    folder.mkdir()
    for seconds in (2.4, 0.02):
        volume = _core.VolumeOptions(str(folder))
        fio.run("fio", volume, mode="mixed", load=LOAD, engine=engine, seconds=seconds)
    assert any("/a\\:b\\\\c/" in word for word in lines[0])
    assert f"--ioengine={name}" in lines[0]
    assert "--runtime=2" in lines[0]
    assert "--runtime=1" in lines[1]
