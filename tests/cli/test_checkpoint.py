"""`memascend checkpoint`: where it writes, what it says, and what it leaves as it was."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from memascend.checkpoint import to_universal
from memascend.cli.main import main
from memascend.errors import CheckpointError

PARAMETER_COUNT = 17


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path]]:
    """The conversions asked for, none of which takes place."""
    found: list[tuple[Path, Path]] = []

    def write(folder: Path, output: Path) -> int:
        found.append((folder, output))
        logging.getLogger("memascend").info("progress")
        return PARAMETER_COUNT

    monkeypatch.setattr(to_universal, "write_universal", write)
    return found


@pytest.mark.parametrize(
    ("words", "folder", "output"),
    [
        (["global_step5"], "global_step5", "global_step5_universal"),
        (["global_step5/"], "global_step5", "global_step5_universal"),
        (["a/b", "--output", "elsewhere"], "a/b", "elsewhere"),
        (["/a/b", "--output", "/c"], "/a/b", "/c"),
    ],
)
def test_the_result_lies_beside_the_checkpoint_unless_told_otherwise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    written: list[tuple[Path, Path]],
    words: list[str],
    folder: str,
    output: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "to-universal", *words]) == 0
    assert written == [(tmp_path / folder, tmp_path / output)]
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path / output}: {PARAMETER_COUNT} parameters")
    assert '"load_universal": true' in printed


@pytest.mark.parametrize("fails", [False, True])
def test_the_log_is_quiet_meanwhile_and_as_it_was_afterwards(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    written: list[tuple[Path, Path]],
    fails: bool,
) -> None:
    caplog.set_level(logging.INFO, logger="memascend")
    if fails:

        def refuse(folder: Path, output: Path) -> int:
            logging.getLogger("memascend").info("progress")
            raise CheckpointError(f"{folder} cannot be read")

        monkeypatch.setattr(to_universal, "write_universal", refuse)
    assert main(["checkpoint", "to-universal", "/saved"]) == int(fails)
    assert caplog.records == []
    assert logging.getLogger("memascend").level == logging.INFO
    assert ("/saved cannot be read" in capsys.readouterr().err) == fails


def test_where_checkpoints_cannot_be_read_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "memascend.checkpoint.to_universal", None)
    assert main(["checkpoint", "to-universal", "/saved"]) == 1
    message = capsys.readouterr().err
    assert "environment that trains" in message
    assert "Likely cause" in message


@pytest.mark.parametrize("words", [[], ["to-universl"], ["to-universal"]])
def test_a_mistake_in_the_command_line_is_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *words])
    assert caught.value.code == 2
