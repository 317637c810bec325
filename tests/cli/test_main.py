"""The command line as a whole: its exit statuses, and where its messages go."""

from __future__ import annotations

import sys

import pytest

from memascend.cli import doctor
from memascend.cli.main import main
from memascend.errors import MemAscendError
from memascend.version import __version__


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"memascend {__version__}\n"


@pytest.mark.parametrize("arguments", [["docter"], ["compare"], ["doctor", "--jsn"]])
def test_a_mistake_in_the_command_line_gives_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_an_unknown_width_of_the_terminal_is_the_usual_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich takes 0 columns for a width, prints nothing, or fails."""
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["plan", "Qwen3-0.6B"]) == 0
    assert "fits" in capsys.readouterr().out


def test_without_a_command_it_prints_its_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "doctor" in printed
    assert "plan" in printed
    monkeypatch.setattr(sys, "argv", ["memascend"])
    assert main() == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (MemAscendError("the drive is gone"), 1, "memascend: the drive is gone\n"),
        (KeyboardInterrupt(), 130, ""),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "memascend: [Errno 13] Permission denied: '/x'. fix: name another path, or allow this "
            "one\n",
        ),
    ],
)
def test_our_errors_and_ctrl_c_end_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    printed: str,
) -> None:
    def fail(path: object) -> None:
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    assert main(["doctor"]) == status
    assert capsys.readouterr() == ("", printed)
