"""`memascend volume bench`: what it measures, prints and chooses, with and without fio."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from memascend import _core
from memascend.cli.main import main
from memascend.cli.volume import fio as volume_fio
from memascend.cli.volume.bench import Setting, choose
from memascend.errors import StoreError
from memascend.volumes.speed import Load

QUICK = ["--seconds", "0.02", "--span", "16MiB", "--chunk", "64KiB,128KiB", "--depth", "2",
         "--engine", "threads"]  # fmt: skip
LOAD = Load(chunk_bytes=1 << 20, queue_depth=32, span_bytes=64 << 20)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["volume", "bench", "--json", *QUICK, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fake_fio(folder: Path, body: str) -> str:
    program = folder / "fio"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_one_drive_is_measured_alone(tmp_path, capsys):
    found = as_json(capsys, "--no-fio", str(tmp_path))
    assert found["engine"] == "threads"
    assert [sample["chunk_bytes"] for sample in found["sweep"]] == [64 << 10, 128 << 10]
    assert found["chosen"]["chunk_bytes"] in (64 << 10, 128 << 10)
    [drive] = found["drives"]
    assert drive["path"] == str(tmp_path)
    assert all(drive[mode] > 0 for mode in ("read", "write", "mixed"))
    assert (found["together"], found["fio"]) == ([], "not asked")
    assert "weights" not in found
    assert list(tmp_path.iterdir()) == []


def test_several_drives_are_measured_alone_and_together(tmp_path, capsys):
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    found = as_json(capsys, "--no-fio", *map(str, paths))
    assert len(found["drives"]) == len(found["together"]) == len(found["weights"]) == 2
    assert min(found["weights"]) == 1.0


def test_the_table_says_the_setting_and_the_block(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(volume_fio, "find", lambda: None)
    assert main(["volume", "bench", *QUICK, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for part in ("GB/s", "read", "write", "mixed", '"queue_depth": 2', "fio is not installed"):
        assert part in printed


def test_several_drives_give_one_block_and_a_warning_where_they_are_one(
    tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.setattr(volume_fio, "find", lambda: None)
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    assert main(["volume", "bench", *QUICK, *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    [block] = [line for line in lines if line.startswith('"memascend": ')]
    found = json.loads(f"{{{block}}}")["memascend"]
    assert found["direct_nvme"]["queue_depth"] == 2
    assert [volume["path"] for volume in found["volumes"]] == [str(path) for path in paths]
    [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert all(str(path) in warning for path in paths)


def test_fio_runs_with_the_same_size_and_depth(tmp_path, capsys, monkeypatch):
    job = {"read": {"bw_bytes": 1000000000}, "write": {"bw_bytes": 500000000}}
    log = tmp_path / "log"
    program = fake_fio(
        tmp_path, f"echo \"$@\" >> {log}\necho 'a warning'\necho '{json.dumps({'jobs': [job]})}'"
    )
    monkeypatch.setattr(volume_fio, "find", lambda: program)
    folder = tmp_path / "drive"
    folder.mkdir()
    found = as_json(capsys, str(folder))
    assert found["drives"][0]["fio"] == dict.fromkeys(("read", "write", "mixed"), 1.5e9)
    chosen = found["chosen"]
    lines = log.read_text().splitlines()
    for mode, line in zip(("read", "write", "rw"), lines, strict=True):
        assert f"--rw={mode} " in line
    for line in lines:
        assert f"--bs={chosen['chunk_bytes']} --iodepth={chosen['queue_depth']} " in line
        assert "--direct=1" in line
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("body", ["echo no space >&2; exit 1", "echo nothing", "echo '{}'"])
def test_a_failing_fio_is_reported_beside_our_figures(tmp_path, capsys, monkeypatch, body):
    program = fake_fio(tmp_path, body)
    monkeypatch.setattr(volume_fio, "find", lambda: program)
    assert "fio" in as_json(capsys, str(tmp_path))["drives"][0]["fio"]["error"]
    with pytest.raises(StoreError, match="fio"):
        volume_fio.run(
            program,
            _core.VolumeOptions(str(tmp_path)),
            mode="read",
            load=LOAD,
            engine="uring",
            seconds=0.1,
        )


def test_fio_is_told_colons_and_engines_its_way():
    line = volume_fio.command(
        "fio", "/mnt/a:b", mode="mixed", load=LOAD, engine="threads", seconds=2.4
    )
    assert "--filename=/mnt/a\\:b" in line
    assert "--ioengine=libaio" in line
    assert "--runtime=2" in line


def test_the_smallest_setting_about_as_fast_as_the_fastest_is_chosen():
    samples = [Setting(1 << 20, 64, 10.0), Setting(1 << 20, 32, 9.8), Setting(1 << 20, 8, 9.0)]
    assert choose(samples).queue_depth == 32


@pytest.mark.parametrize(
    "wrong",
    [["--chunk", "1000"], ["--depth", "0"], ["--depth", "x"], ["--span", "1KiB"],
     ["--seconds", "0"], ["--seconds", "nan"], ["--chunk", "1 apple"]],
)  # fmt: skip
def test_a_mistake_in_the_command_line_is_2(tmp_path, wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["volume", "bench", str(tmp_path), *wrong])
    assert caught.value.code == 2


def test_a_folder_that_is_missing_is_not_made(tmp_path, capsys):
    assert main(["volume", "bench", *QUICK, str(tmp_path / "none")]) == 1
    assert "cannot use the volume" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
