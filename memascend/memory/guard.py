"""Checks that one thread at a time uses a pool, the staging slots, or a stream over them.

Autograd runs hooks on a thread for each device and on one for the host, and a wait for the drive or
the device releases the GIL. Two threads in the middle of two calls may fill the same slot, and no
number shows it. So the callers hold the runtime's lock, and a call without it is an error. A check
takes less than a microsecond, so it is always on. Knows locks; any thread may call.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Guard:
    """The right to call the objects that share a lock: the thread that holds the lock has it."""

    def __init__(self, lock: Any) -> None:
        """Begin to check a `threading.RLock`.

        It is entered as it is: Ctrl-C between an `__enter__` in Python and the block of its `with`
        would leave it locked.
        """
        self.lock = lock
        #: Returns whether the calling thread holds the lock.
        self.is_held: Callable[[], bool] = lock._is_owned

    def expect_held(self, call: str) -> None:
        """Raise AssertionError if the calling thread does not hold the lock, which `call` needs."""
        if not self.is_held():
            raise AssertionError(
                f"{call}() was called without the runtime's lock on the thread "
                f"{threading.current_thread().name!r}: another thread may use the same memory. "
                "cause: a call into memascend that does not take the lock, which is a mistake of "
                "memascend, or a script that calls a data path itself. fix: `with runtime.lock:` "
                "around the calls, never around a wait for a collective; please report it"
            )


class Guarded(Protocol):
    """An object with `guarded` methods."""

    guard: Guard | None  # None: its owner ensures that one thread at a time calls


Owner = TypeVar("Owner", bound=Guarded)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def guarded(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Check at each call that the calling thread holds the lock of the owner's guard."""
    name = method.__qualname__

    @functools.wraps(method)
    def checked(self: Owner, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if self.guard is not None:
            self.guard.expect_held(name)
        return method(self, *arguments, **keywords)

    return checked
