"""Calls that one thread at a time makes, and that Ctrl-C leaves nothing half-way behind.

Backward runs hooks on autograd's thread of each device, the host included, and a wait for the drive
or the device lets go of the interpreter's lock: another thread's hook then begins in the middle of
the first one's. A lock of the data paths is held for one call. A collective may begin under it, but
none is waited for. It is reentrant, since a signal's handler runs in the middle of a call of the
same thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Recoverable(Protocol):
    """What shares the data paths with other threads."""

    lock: AbstractContextManager[Any]
    is_interrupted: bool  # by a call that was left before all was let go

    def recover(self) -> None:
        """Let everything go, in whatever state an interrupted call has left it."""


Owner = TypeVar("Owner", bound=Recoverable)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Hold the owner's lock during a call, and let go of everything after Ctrl-C in it.

    Ctrl-C may leave any line, so nothing is believed of what the call has left; an error leaves a
    state that was thought of. Where Ctrl-C comes again, the next call begins with letting go.
    """

    def whole(self: Owner, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if self.is_interrupted:
            _recover(self)
        try:
            return method(self, *arguments, **keywords)
        except Exception:
            raise
        except BaseException:
            self.is_interrupted = True  # before any call, which Ctrl-C may come behind
            _recover(self)
            raise

    @functools.wraps(method)
    def alone(self: Owner, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        with self.lock:
            return whole(self, *arguments, **keywords)

    return alone


def _recover(owner: Recoverable) -> None:
    owner.recover()
    owner.is_interrupted = False
