"""Backward passes of one engine: which are under way, how they end, and passes inside of others.

A hook of a running `engine.backward()` may call the engine again, forward and backward: GradCache
does, and a reentrant checkpoint around the whole engine. DeepSpeed reduces gradients when the outer
call ends. So the inner passes are one micro-step: their gradients are reduced one pass after the
other, and a parameter that has a gradient of an earlier pass adds to it.

DeepSpeed resets its own notes with every forward pass, and cannot tell a pass that failed from one
that still runs. These notes can: autograd calls back when a graph has run to its end, and a seam
sees every call of `engine.backward()` begin and end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memascend.errors import IncompleteGradientError

_NO_GRAPH = -1


def _current_graph() -> int:
    """Return the number of the graph that autograd runs on this thread; -1 without one."""
    return int(torch._C._current_graph_task_id())


class BackwardPasses:
    """Notes of one optimizer. Hooks on autograd's threads call, while their caller waits."""

    def __init__(self) -> None:
        self._call_count = 0  # of engine.backward(), under way
        self._graph: int | None = None  # of this engine's outputs; it has not run to its end
        self._has_failed = False
        self._is_open = False  # a pass began, and not all of its gradients are reduced
        self._reduced: set[int] = set()
        self._earlier: set[int] = set()  # with a gradient of an earlier pass of the outer call

    def enter(self) -> bool:
        """Note that a pass begins, on the thread that runs its graph.

        Returns:
            Whether the graph is new; each output of the engine in a graph calls this once.

        Raises:
            IncompleteGradientError: Another pass has not run to its end.
        """
        graph = _current_graph()
        if graph != _NO_GRAPH and graph == self._graph:
            return False
        self.check()
        self._is_open = True
        if graph != _NO_GRAPH:
            self._graph = graph
            end = functools.partial(setattr, self, "_graph", None)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        return True

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Stand around a call of `engine.backward()`."""
        self._call_count += 1
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._call_count -= 1

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Stand around the reduction at the end of a pass; an inner one calls `keep`.

        Raises:
            IncompleteGradientError: A pass inside this one has failed, and the script went on.
        """
        self.check()
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
        if not self.is_inner:
            self.forget()

    @property
    def is_inner(self) -> bool:
        """Whether the `engine.backward()` that ends is inside another one."""
        return self._call_count > 1

    def continues(self) -> bool:
        """Return whether a forward pass begins inside a backward pass with gradients to be kept."""
        return self.is_under_way() and self._is_open

    def was_left(self) -> bool:
        """Return whether an error has left a backward pass; never while one is under way."""
        return not self.is_under_way() and (self._has_failed or self._graph is not None)

    def check(self) -> None:
        """Check that no pass was left whose gradients are to be used.

        Raises:
            IncompleteGradientError: Some pass failed, or has not run to its end.
        """
        if self._has_failed or self._graph is not None:
            raise IncompleteGradientError

    def note_reduced(self, ds_ids: Iterable[int]) -> None:
        """Note parameters of which a gradient was stored."""
        self._reduced.update(ds_ids)

    def adds(self, ds_id: int) -> bool:
        """Return whether a parameter's gradient is added to that of an earlier pass."""
        return ds_id in self._earlier

    def keep(self) -> None:
        """Have later passes of the same outer call add to the gradients that were stored."""
        self._earlier |= self._reduced
        self._reduced.clear()

    def forget(self) -> None:
        """Reset the notes: all gradients are reduced, or dropped."""
        self._graph, self._has_failed, self._is_open = None, False, False
        self._earlier.clear()
        self._reduced.clear()

    def is_under_way(self) -> bool:
        """Return whether a backward pass runs."""
        # Autograd runs a hook on the thread that runs its graph, also on a device's own thread. The
        # count finds a thread of the script that a hook waits for, too.
        return self._call_count > 0 or _current_graph() != _NO_GRAPH


def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand around `DeepSpeedEngine.backward`: the optimizer knows when it begins and ends."""

    @functools.wraps(original)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        passes = getattr(self.optimizer, "passes", None)
        if not isinstance(passes, BackwardPasses):
            return original(self, *arguments, **keywords)
        self.optimizer.drop_left()
        with passes.calling():
            return original(self, *arguments, **keywords)

    return backward
