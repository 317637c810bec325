"""Ctrl-C at any line of the product."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import memascend

OURS = str(Path(memascend.__file__).parent)
#: Only take and give back a lock: the interpreter runs handlers behind calls and in loops, not
#: between `with` and its block as a tracer would. A function, and a line.
LOCKING = "alone"
LOCKED = "with self._changed:"
#: Python swallows it there.
FINALIZING = "__del__"


class _Interrupt:
    """Raises KeyboardInterrupt at one line of ours, as a signal's handler would."""

    def __init__(self, at_line: int) -> None:
        self.left = at_line
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(OURS) or frame.f_code.co_name in (LOCKING, FINALIZING):
            return None
        if event == "line" and linecache.getline(name, frame.f_lineno).strip() != LOCKED:
            self.left -= 1
            if self.left < 0:
                self.where = f"{name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(at_line: int, work: Callable[[], object]) -> str | None:
    """Do work until Ctrl-C at so many lines of ours; return where, None when it ended before."""
    interrupt = _Interrupt(at_line)
    sys.settrace(interrupt)
    try:
        work()
    except KeyboardInterrupt:
        return interrupt.where
    finally:
        sys.settrace(None)
    return None
