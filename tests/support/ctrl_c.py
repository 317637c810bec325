"""Ctrl-C at any line of the product, and once more at any line of what that leaves to do."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import memascend

OURS = str(Path(memascend.__file__).parent)
#: Only take and give back a lock: the interpreter runs handlers behind calls and in loops, not
#: between `with` and its block as a tracer would. Functions, and a line. Or only look at a lock.
LOCKING = ("alone", "with_lock", "checked")
LOCKED = ("with self._changed:", "with self._guard.lock:", "with self._lock:")
BLOCK = "with "
#: Python swallows it there.
FINALIZING = "__del__"
#: Of lines, in each full run: it begins with another one each time.
FINE = 6


def each_stride(coarse: int) -> pytest.MarkDecorator:
    """Have a test run with the stride of a quick run, of a full one, and with each line."""
    return pytest.mark.parametrize(
        "stride",
        [
            pytest.param(coarse, marks=pytest.mark.coarse),
            pytest.param(FINE, marks=pytest.mark.full, id=f"{FINE}, by chance"),
            pytest.param(1, marks=[pytest.mark.full, pytest.mark.matrix]),
        ],
    )


class _Interrupt:
    """Raises KeyboardInterrupt at lines of ours, as a signal's handler would."""

    def __init__(self, at_line: int, then: int | None) -> None:
        """Begin with none.

        Args:
            at_line: Lines before it comes.
            then: Lines of those behind it before it comes again; None: it does not.
        """
        self._left: int | None = at_line
        self._then = then
        self.places: list[str] = []
        self.behind: list[str] = []  # lines that came behind the first

    def start(self) -> None:
        sys.settrace(self)

    @staticmethod
    def stop() -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(OURS) or frame.f_code.co_name in (*LOCKING, FINALIZING):
            return None
        line = linecache.getline(name, frame.f_lineno).partition("#")[0].strip()
        # A tracer sees a block's first line again when an exception leaves the block, at which no
        # signal is looked for; and what is raised there leaves the exception to the thread.
        if event == "line" and line not in LOCKED and not (self.places and line.startswith(BLOCK)):
            place = f"{name}:{frame.f_lineno}"
            if self.places:
                self.behind.append(place)
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    self.places.append(place)
                    self._left, self._then = self._then, None
                    sys.settrace(None)
                    # What is raised here ends the tracing. Signals are looked for at calls, not
                    # before, so that the next one is soon enough to begin it again.
                    sys.setprofile(self._go_on)
                    raise KeyboardInterrupt
        return self

    def _go_on(self, frame: FrameType, event: str, _: object) -> None:
        sys.setprofile(None)
        outer: FrameType | None = frame
        while outer is not None:
            if outer.f_code.co_filename.startswith(OURS):
                outer.f_trace = self
            outer = outer.f_back
        sys.settrace(self)


def interrupted(at_line: int, work: Callable[[], object], then: int | None = None) -> list[str]:
    """Do work until Ctrl-C at so many lines of ours, and again; return where, where it came."""
    return _run(at_line, work, then).places


def interruptions(make: Callable[[], Callable[[], object]], stride: int = 1) -> Iterator[list[str]]:
    """Do work until Ctrl-C at each line of ours, and again at each that comes behind one.

    Yields after each time where it came; at the end nowhere. A line is interrupted once as one
    that comes behind.

    Args:
        make: Makes the work anew.
        stride: Of lines, only one in so many. By FINE it begins with one of the first, by chance:
            in some runs each line has been interrupted.
    """
    seen: set[str] = set()
    at_line = random.randrange(stride) if stride == FINE else 0
    print(f"the first line that is interrupted: {at_line}, then every {stride}")
    while True:
        first = _run(at_line, make(), None)
        yield first.places
        if not first.places:
            return
        for then, place in enumerate(first.behind):
            if place not in seen:
                seen.add(place)
                yield interrupted(at_line, make(), then)
        at_line += stride


def _run(at_line: int, work: Callable[[], object], then: int | None) -> _Interrupt:
    interrupt = _Interrupt(at_line, then)
    interrupt.start()
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        interrupt.stop()
    return interrupt
