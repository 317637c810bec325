"""What is shown while something long goes on: a spinner on a terminal, a line now and then else."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from memascend.cli.compare import activity

PATIENCE_S = 60.0
# What looks like a style of rich, as in a loss that is a list.
TITLE, DETAIL = "stock: [bold] running", "RSS 1.00 GiB  loss [1.5]"


class Heard:
    """A detail, and the moment in which somebody asked for it for the second time."""

    def __init__(self) -> None:
        self._count = 0
        self.twice = threading.Event()

    def __call__(self) -> str:
        self._count += 1
        if self._count > 1:
            self.twice.set()
        return DETAIL


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120, color_system=None)


def printed(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_latest_news_are_shown_again_and_again(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(activity, "LINE_INTERVAL_S", 0.001)
    screen, detail = console(is_terminal=is_terminal), Heard()
    with activity.activity(screen, TITLE, detail):
        assert detail.twice.wait(PATIENCE_S)
    assert f"{TITLE}  0:00  {DETAIL}" in printed(screen)


def test_without_a_terminal_short_work_is_one_line() -> None:
    screen = console(is_terminal=False)
    with activity.activity(screen, TITLE, lambda: DETAIL):
        pass
    assert printed(screen) == f"{TITLE}\n"


def test_a_terminal_is_left_without_a_trace_of_it() -> None:
    screen, detail = console(is_terminal=True), Heard()
    with activity.activity(screen, TITLE, detail):
        assert detail.twice.wait(PATIENCE_S)
    screen.print("done")
    after = printed(screen).rpartition(DETAIL)[2]
    assert "\x1b[2K" in after  # its line is erased
    assert after.endswith("done\n")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_work_that_fails_ends_it_and_is_not_hidden(is_terminal: bool) -> None:
    before = set(threading.enumerate())
    started: set[threading.Thread] = set()

    def work() -> None:
        with activity.activity(console(is_terminal=is_terminal), TITLE, lambda: DETAIL):
            started.update(set(threading.enumerate()) - before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert started
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_the_time_is_in_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1000.0])
    monkeypatch.setattr(activity.time, "monotonic", lambda: next(now, 1125.9))
    monkeypatch.setattr(activity, "LINE_INTERVAL_S", 0.001)
    screen, detail = console(is_terminal=False), Heard()
    with activity.activity(screen, TITLE, detail):
        assert detail.twice.wait(PATIENCE_S)
    assert "  2:05  " in printed(screen)
