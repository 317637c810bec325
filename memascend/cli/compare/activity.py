"""Shows that something long is going on: a spinner, or now and then a line without a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

LINE_INTERVAL_S = 15.0  # without a terminal, report progress no more often


@contextmanager
def activity(console: Console, title: str, detail: Callable[[], str]) -> Iterator[None]:
    """Show one long piece of work for as long as the block lasts.

    `detail` gives the latest news in a few words; another thread calls it, several times a second.
    """
    started_s = time.monotonic()
    spinner = Spinner("dots")

    def line() -> Text:
        minutes, seconds = divmod(int(time.monotonic() - started_s), 60)
        text = f"{title}  {minutes}:{seconds:02d}  {detail()}"
        return Text(text, overflow="ellipsis", no_wrap=True)

    def render() -> Spinner:
        spinner.update(text=line())
        return spinner

    if console.is_terminal:
        with Live(get_renderable=render, console=console, transient=True):
            yield
        return
    console.print(title, markup=False, highlight=False)
    ended = threading.Event()

    def say_now_and_then() -> None:
        while not ended.wait(LINE_INTERVAL_S):
            console.print(line(), highlight=False, soft_wrap=True)

    thread = threading.Thread(target=say_now_and_then, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
