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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from memascend.config.installed import INNER_PASSES, require
from memascend.deepspeed.attach.attachment import attachment_of_optimizer
from memascend.deepspeed.attach.lone_failure import noting
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.errors import ConfigError, IncompleteGradientError

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
            self.reset()

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

    def has_reduced(self, ds_id: int) -> bool:
        """Return whether a parameter's gradient was stored in this pass."""
        return ds_id in self._reduced

    def adds(self, ds_id: int) -> bool:
        """Return whether a parameter's gradient must be added to that of an earlier pass."""
        return ds_id in self._earlier

    def keep(self) -> None:
        """Make later passes of the same outer call add to the stored gradients."""
        self._earlier |= self._reduced
        self._reduced.clear()

    def reset(self) -> None:
        """Reset: all gradients are reduced, or dropped."""
        self._graph, self._has_failed, self._is_open = None, False, False
        self._earlier.clear()
        self._reduced.clear()

    def is_under_way(self) -> bool:
        """Return whether a backward pass runs."""
        # Autograd runs a hook on the thread that runs its graph, which may be a device's thread.
        # The count also covers a thread of the script for which a hook waits.
        return self._call_count > 0 or _current_graph() != _NO_GRAPH


class SlicedPass(Protocol):
    """The gradients of a pass in slices (memascend/deepspeed/slices/weights.py)."""

    def note_step(self) -> None:
        """Note that weights have changed."""

    def drop(self) -> None:
        """Drop the sums of an aborted backward pass, and expect nothing of its graph."""

    def deliver_late(self) -> None:
        """Put gradients into buckets that wait for the end of a pass."""

    def take(
        self, params: Sequence[Any], parts: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Return the parameters whose reduced gradients are complete, with these."""


class PassHooks:
    """DeepSpeed's hooks around backward passes. `original` and `reduce` are its own functions."""

    def __init__(self, upstream: Upstream, restart: Callable[[], None]) -> None:
        """Start without a pass.

        Args:
            upstream: The optimizer.
            restart: Drops the gradients that have arrived for the coming step.
        """
        self._upstream, self._restart = upstream, restart
        #: The passes so far.
        self.passes = BackwardPasses()
        #: The gradients of passes in slices; None: the model runs whole.
        self.slices: SlicedPass | None = None

    def begin_forward(self, original: Callable[[], None], reduce: Callable[[], None]) -> None:
        """Begin a forward pass; drop the gradients of a backward pass that an error aborted.

        DeepSpeed would add the next gradients to those not reduced, or find a parameter twice in a
        bucket. Gradients that were reduced are overwritten by the next pass, unless it accumulates:
        after an error in a later micro-step the script must call `zero_grad`.

        Inside a running backward pass the gradients in the buckets are reduced instead, so that the
        inner pass finds the buckets empty.

        Raises:
            ConfigError: The installed DeepSpeed cannot count a pass inside another one.
        """
        if self.passes.continues():
            require(
                INNER_PASSES,
                "a call of the engine inside its own backward pass (GradCache, a reentrant "
                "checkpoint around the engine)",
                "call the engine before or after that pass",
            )
            self._keep(reduce)
        self._drop_unreduced()
        original()

    def drop_left(self) -> None:
        """Drop the gradients of a backward pass that an error aborted, if there is one."""
        if self.passes.was_left():
            self._drop()

    def restart_window(self, original: Callable[[], None]) -> None:
        """Restart the window of micro-steps as DeepSpeed, also after an aborted pass."""
        self._drop_unreduced()
        original()

    def _drop_unreduced(self) -> None:
        """Drop the gradients of an aborted pass, also if it failed in the final reduction.

        The count of open graphs is then above 0 while no pass runs.
        """
        is_open = self._upstream.open_graph_count > 0 and not self.passes.is_under_way()
        if is_open or self.passes.was_left():
            self._drop()

    def _drop(self) -> None:
        self._upstream.drop_unreduced()
        if self.slices is not None:
            self.slices.drop()
        self._restart()  # gradients of the next pass may arrive in another order
        self.passes.reset()

    def begin_backward(self, original: Callable[[], None]) -> None:
        """Begin a backward pass as DeepSpeed, once per graph.

        DeepSpeed counts a graph with two outputs twice, and would not reduce at its end.
        """
        if self.passes.enter() or self._upstream.open_graph_count == 0:
            original()

    def end_backward(self, reduce: Callable[[], None]) -> None:
        """Reduce as DeepSpeed at the end of a pass; nested passes are one micro-step.

        Raises:
            IncompleteGradientError: A pass inside this one failed, and the script continued.
        """
        with self.passes.ending():
            if self.slices is not None:
                self.slices.deliver_late()
            if self.passes.is_inner:
                self._keep(reduce)
                return
            reduce()
        # The graphs of inner passes were counted too; only this one still runs.
        self._upstream.leave_inner_graphs()

    def _keep(self, reduce: Callable[[], None]) -> None:
        """Reduce the buckets; later passes of the same micro-step add to these gradients."""
        reduce()
        self._upstream.continue_micro_step()
        self.passes.keep()

    def put(
        self,
        params: Sequence[Any],
        partitions: Sequence[Any],
        store: Callable[[list[Any], list[Any]], Any],
    ) -> Any:
        """Store the gradients of a bucket; add those of parameters reduced by an earlier pass."""
        if self.slices is not None:
            params, partitions = self.slices.take(params, partitions)
            self._check_once(params)
        adding = [self.passes.adds(param.ds_id) for param in params]
        taken = []
        for adds in sorted(set(adding)):
            chosen = [number for number, one in enumerate(adding) if one == adds]
            with self._upstream.adding() if adds else nullcontext():
                taken += store(
                    [params[number] for number in chosen],
                    [partitions[number] for number in chosen],
                )
        self.passes.note_reduced(param.ds_id for param in params)
        return taken

    def _check_once(self, params: Sequence[Any]) -> None:
        """Check that no gradient of these parameters came in this pass: this one would replace it.

        Raises:
            ConfigError: One did.
        """
        for param in params:
            if self.passes.has_reduced(param.ds_id):
                raise ConfigError(
                    f"the gradient of {self._upstream.name_of(param)} came twice in one backward "
                    "pass. cause: the model uses this parameter in a layer that computes in slices "
                    "(memascend.micro_batches) and outside of it without a module of its own. fix: "
                    "leave memascend.micro_batches out"
                )

    def check(self) -> None:
        """Check that all gradients of finished passes are reduced, before a step.

        Raises:
            IncompleteGradientError: The last backward pass failed, or was not reduced.
        """
        self.passes.check()
        if self._upstream.has_unreduced():
            raise IncompleteGradientError  # DeepSpeed would drop them and use older ones


def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DeepSpeedEngine.backward`, so that the optimizer knows when it begins and ends."""

    @functools.wraps(original)
    def backward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        hooks = getattr(self.optimizer, "passes", None)
        if not isinstance(hooks, PassHooks):
            return original(self, *arguments, **keywords)
        hooks.drop_left()
        attachment = attachment_of_optimizer(self.optimizer)
        with (
            hooks.passes.calling(),
            noting(None if attachment is None else attachment.failures),
        ):
            return original(self, *arguments, **keywords)

    return backward
