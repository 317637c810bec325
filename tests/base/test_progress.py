"""Progress: a bar on a terminal, a line in the log, and neither on ranks that do not lead."""

from __future__ import annotations

import logging
import sys

import pytest

from memascend.base import progress as module
from memascend.base.progress import UPDATE_INTERVAL_S, Meter, byte_progress


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


def test_a_bar_is_updated_ten_times_a_second_however_small_the_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    shown: list[dict[str, object]] = []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    meter = Meter(lambda **what: shown.append(what))
    for _ in range(1000):
        meter(10)
        now[0] += UPDATE_INTERVAL_S / 100
    assert len(shown) == pytest.approx(10, abs=1)
    meter.show()
    assert shown[-1] == {"completed": 10_000}
    assert meter.moved_bytes == 10_000
    meter.describe("2/3")
    assert shown[-1] == {"description": "2/3"}


def test_what_nobody_knows_the_end_of_has_a_bar_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with byte_progress("measuring", None, leads=True) as meter:
        meter.describe("1/2 reading")
        meter(3_000_000_000)
    shown = capsys.readouterr().err
    assert "1/2 reading" in shown
    assert "3.0/? GB" in shown


def test_logs_go_above_the_bar_also_from_handlers_that_hold_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler(sys.stdout)  # as DeepSpeed's, made when it is imported
    logger = logging.getLogger("somebody's")
    logger.addHandler(handler)
    try:
        with byte_progress("saving [x]", 10, leads=True):
            logger.warning("in the middle")
            assert handler.stream is not sys.__stdout__
            held = handler.stream
        assert handler.stream is sys.stdout is not held
    finally:
        logger.removeHandler(handler)
    captured = capsys.readouterr()
    assert "in the middle\n" in captured.out + captured.err
    assert "saving [x]" in captured.err


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
