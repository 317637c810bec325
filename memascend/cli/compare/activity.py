"""Shows that something long is going on: a spinner, or now and then a line without a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

LINE_INTERVAL_S = 15.0  # without a terminal, report progress no more often


class Activity:
    """One long piece of work, as a context manager.

    Args:
        console: Where to show it.
        title: What is being done.
        detail: Gives the latest news in a few words. Called from another thread, several times a
            second on a terminal.
    """

    def __init__(self, console: Console, title: str, detail: Callable[[], str]) -> None:
        self._console = console
        self._title = title
        self._detail = detail
        self._started_s = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(get_renderable=self._render, console=console, transient=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._say_now_and_then, daemon=True)

    def __enter__(self) -> Activity:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(self._title, markup=False, highlight=False)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._thread.join()

    def _say_now_and_then(self) -> None:
        while not self._ended.wait(LINE_INTERVAL_S):
            self._console.print(self._text(), highlight=False, soft_wrap=True)

    def _render(self) -> Spinner:
        self._spinner.update(text=self._text())
        return self._spinner

    def _text(self) -> Text:
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        line = f"{self._title}  {minutes}:{seconds:02d}  {self._detail()}"
        return Text(line, overflow="ellipsis", no_wrap=True)
