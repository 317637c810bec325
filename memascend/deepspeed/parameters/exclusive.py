"""A decorator for methods that one thread at a time runs, and that recover from Ctrl-C.

Backward runs hooks on autograd's thread of each device, the host included. A wait for the drive or
the device releases the GIL, so another thread's hook may begin in the middle of the first one's. So
each call holds the runtime's lock. A collective may begin under the lock, but none is waited for.
The lock is reentrant, since a signal handler may run in the middle of a call on the same thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Recoverable(Protocol):
    """An object whose methods are `exclusive`."""

    lock: AbstractContextManager[Any]
    is_interrupted: bool  # Ctrl-C ended a call, and `recover` has not completed since

    def recover(self) -> None:
        """Release everything, in any state that an interrupted call has left."""


Owner = TypeVar("Owner", bound=Recoverable)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def exclusive(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Hold the owner's lock during a call; after Ctrl-C in it, release everything.

    Ctrl-C may end a call at any line, so its state cannot be trusted; after an Exception the method
    itself leaves a valid state. If Ctrl-C interrupts `recover` too, the next call begins with it.
    """

    def whole(self: Owner, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if self.is_interrupted:
            _recover(self)
        try:
            return method(self, *arguments, **keywords)
        except Exception:
            raise
        except BaseException:
            self.is_interrupted = True  # first, since Ctrl-C may come again after any call
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
