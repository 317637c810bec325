"""The command line: exit statuses, and what doctor says of this machine and of bad places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memascend.cli import doctor
from memascend.cli.main import main
from memascend.system.mounts import filesystem_of
from memascend.version import __version__

CHECKS = ["system", "torch", "deepspeed", "activation", "io_uring", "page lock", "huge pages"]
CHECKS += ["host memory", "libaio"]


def diagnose(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", "--path", str(path)])
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] == (status == 0)
    return status, {check["name"]: check for check in report["checks"]}


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"memascend {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["docter"], ["compare"], ["doctor", "--jsn"]])
def test_a_mistake_in_the_command_line_gives_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_doctor_looks_at_everything_and_ends_with_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checks = diagnose(tmp_path, capsys)
    assert list(checks) == [*CHECKS, "disk", "wear", "direct I/O", "trial"]
    assert checks["trial"]["state"] == "ok"
    assert "1.00 MiB written, read and compared by" in checks["trial"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_whatever_is_not_ok_comes_with_a_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checks = diagnose(tmp_path, capsys)
    assert all(check["fix"] for check in checks.values() if check["state"] != "ok")


def test_a_folder_that_does_not_exist_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, checks = diagnose(tmp_path / "missing", capsys)
    assert status == 1
    assert checks["path"]["state"] == "problem"
    assert "trial" not in checks


def test_memory_is_not_accepted_as_a_disk(capsys: pytest.CaptureFixture[str]) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or filesystem_of(memory) != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    status, checks = diagnose(memory, capsys)
    assert status == 1
    assert checks["disk"]["state"] == "problem"


def test_what_is_read_back_is_really_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memascend import _core

    class LosesReads(_core.Store):
        def read(self, *, key: str, address: int, nbytes: int, **_: object) -> _core.Ticket:
            return self.write(key="elsewhere", address=address, nbytes=nbytes)

    monkeypatch.setattr(_core, "Store", LosesReads)
    status, checks = diagnose(tmp_path, capsys)
    assert status == 1
    assert "differs" in checks["trial"]["found"]


def test_a_refused_io_uring_is_a_note_that_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def syscall(self, *_: object) -> int:
            import ctypes

            ctypes.set_errno(1)
            return -1

    monkeypatch.setattr(doctor.ctypes, "CDLL", Refusing)
    check = doctor._io_uring()
    assert check.state == "note"
    assert "Operation not permitted" in check.found
    assert check.fix


@pytest.mark.parametrize(("version", "state"), [("0.19.8", "ok"), ("0.18.0", "problem")])
def test_only_the_deepspeed_it_was_made_for_is_ok(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str
) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: version)
    assert doctor._deepspeed().state == state
