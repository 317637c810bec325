"""Progress: a bar on a terminal, a line in the log, and neither on ranks that do not lead."""

from __future__ import annotations

import logging
import sys

import pytest

pytest.importorskip("torch")

from memascend.checkpoint.progress import byte_progress


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_a_bar_on_a_terminal_and_a_line_in_the_log(
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    with (
        caplog.at_level(logging.INFO),
        byte_progress("saving x", 2_000_000_000, leads=True) as advance,
    ):
        advance(500_000_000)
        advance(1_500_000_000)
    assert "saving x: 2.00 GB in" in caplog.text
    shown = capsys.readouterr().err
    assert ("2.0/2.0 GB" in shown) == is_terminal
    assert is_terminal or shown == ""


def test_other_ranks_show_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), byte_progress("x", 1, leads=False) as advance:
        advance(1)
    assert caplog.text == ""


def test_what_failed_has_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with byte_progress("x", 1, leads=True) as advance:
            advance(1)
            raise OSError("full")

    with caplog.at_level(logging.INFO), pytest.raises(OSError, match="full"):
        fail()
    assert caplog.text == ""
