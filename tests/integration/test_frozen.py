"""Frozen parameters in checkpoints: there, whoever saves and whoever loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import RunProgram

PROGRAM = Path(__file__).with_name("frozen_program.py")
pytestmark = pytest.mark.deepspeed

#: Weight and bias of the frozen layer, and of the one that learns; a frozen uint8 and int64.
ALL = [True] * 6


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("memascend", "memascend"),
        pytest.param("memascend", "cpu", marks=pytest.mark.full),
        pytest.param("cpu", "memascend", marks=pytest.mark.full),
    ],
)
def test_what_is_frozen_is_saved_and_loaded(
    run_program: RunProgram, tmp_path: Path, saver: str, loader: str
) -> None:
    found = run_program(str(PROGRAM), saver, loader, str(tmp_path))
    assert found["as saved"] == found["exported"] == ALL
    assert not any(found["as before"])
    assert Path(found["path"]).is_file()


@pytest.mark.full
def test_what_was_left_out_keeps_its_values(run_program: RunProgram, tmp_path: Path) -> None:
    arguments = ("memascend", "memascend", str(tmp_path), "--exclude-frozen")
    found = run_program(str(PROGRAM), *arguments)
    assert found["as before"] == [True, True, False, False, True, True]
    assert found["as saved"] == [False, False, True, True, False, False]
