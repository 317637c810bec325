"""A decorator for the optimizer's methods that use slots: they hold the runtime's lock.

No gradient waits on the device then: the thread that stores gradients uses their stream, and the
tiles of early steps, without the lock.

Scripts call such methods in gradient hooks too, for instance with `safe_get_full_grad`, while
another thread of autograd delivers a gradient. A decorated method must not wait for a collective:
on another rank the thread that has to join it may be waiting for that rank's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from memascend.runtime import Runtime


class OfRuntime(Protocol):
    """A member of an optimizer that knows its runtime."""

    @property
    def runtime(self) -> Runtime:
        """The model's runtime."""


Owner = TypeVar("Owner", bound=OfRuntime)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def locked(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Hold the runtime's lock during a method, when no gradient waits on the device."""

    @functools.wraps(method)
    def alone(self: Owner, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        return with_lock(self.runtime, functools.partial(method, self, *arguments, **keywords))

    return alone


def with_lock(runtime: Runtime, call: Callable[[], Result]) -> Result:
    """Hold the runtime's lock during a call, when no gradient waits on the device."""
    while True:
        runtime.on_device.wait()
        with runtime.lock:
            if runtime.on_device.is_quiet():  # else a hook has brought one meanwhile
                return call()
