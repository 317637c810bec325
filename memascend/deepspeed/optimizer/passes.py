"""Tracks the backward passes of one engine: running, failed, and nested in another.

A hook of a running `engine.backward()` may call the engine again, forward and backward: GradCache
does, and so does a reentrant checkpoint around the whole engine. DeepSpeed reduces gradients when
the outer call ends. So the inner passes are one micro-step: the gradients of each pass are reduced
when it ends, and a parameter that has a gradient of an earlier pass adds to it.

DeepSpeed resets its own state in every forward pass, and cannot tell a failed pass from a running
one. This class can: autograd calls back when a graph has finished, and a seam wraps
`engine.backward()`.
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
    """Return the number of the graph that autograd runs on this thread; -1 if none."""
    return int(torch._C._current_graph_task_id())


class BackwardPasses:
    """State of one optimizer. Hooks on autograd's threads call it while their caller waits."""

    def __init__(self) -> None:
        self._call_count = 0  # nested calls of engine.backward()
        self._graph: int | None = None  # the running graph of this engine's outputs
        self._has_failed = False
        self._is_open = False  # a pass began, and not all of its gradients are reduced
        self._reduced: set[int] = set()  # ds_ids reduced in this pass
        self._earlier: set[int] = set()  # ds_ids reduced in earlier passes of the outer call

    def enter(self) -> bool:
        """Note that a pass begins, on the thread that runs its graph.

        Returns:
            Whether the graph is new: every output of the engine in a graph calls this once.

        Raises:
            IncompleteGradientError: Another pass has failed or not finished.
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
        """Wrap a call of `engine.backward()`."""
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
        """Wrap the reduction at the end of a pass; an inner pass calls `keep` within it.

        Raises:
            IncompleteGradientError: A pass inside this one failed, and the script continued.
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
        """Whether the current `engine.backward()` is inside another one."""
        return self._call_count > 1

    def continues(self) -> bool:
        """Return whether a backward pass runs that still has gradients to reduce."""
        return self.is_under_way() and self._is_open

    def was_left(self) -> bool:
        """Return whether a backward pass was aborted by an error; False while one runs."""
        return not self.is_under_way() and (self._has_failed or self._graph is not None)

    def check(self) -> None:
        """Check that every pass so far has finished without an error.

        Raises:
            IncompleteGradientError: A pass has failed or not finished.
        """
        if self._has_failed or self._graph is not None:
            raise IncompleteGradientError

    def note_reduced(self, ds_ids: Iterable[int]) -> None:
        """Note parameters whose gradients were stored."""
        self._reduced.update(ds_ids)

    def adds(self, ds_id: int) -> bool:
        """Return whether a parameter's gradient must be added to that of an earlier pass."""
        return ds_id in self._earlier

    def keep(self) -> None:
        """Make later passes of the same outer call add to the stored gradients."""
        self._earlier |= self._reduced
        self._reduced.clear()

    def forget(self) -> None:
        """Reset: all gradients are reduced, or dropped."""
        self._graph, self._has_failed, self._is_open = None, False, False
        self._earlier.clear()
        self._reduced.clear()

    def is_under_way(self) -> bool:
        """Return whether a backward pass runs."""
        # Autograd runs a hook on the thread that runs its graph, which may be a device's thread.
        # The count also covers a thread of the script for which a hook waits.
        return self._call_count > 0 or _current_graph() != _NO_GRAPH


def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DeepSpeedEngine.backward`, so that the optimizer knows when it begins and ends."""

    @functools.wraps(original)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        passes = getattr(self.optimizer, "passes", None)
        if not isinstance(passes, BackwardPasses):
            return original(self, *arguments, **keywords)
        self.optimizer.drop_left()
        with passes.calling():
            return original(self, *arguments, **keywords)

    return backward
