"""Stands in for activation checkpointing: a layer that would be checkpointed runs in slices.

A layer is a call of a checkpoint function: torch's, DeepSpeed's, or the one that transformers gives
its layers. What cannot be cut is checkpointed as before, with one line in the log.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memascend.slices.cut import CannotCut, Cut, Leaves, cut_batch
from memascend.slices.documents import Documents, cut_documents
from memascend.slices.sliced import SlicedCall, SliceWeights

log = logging.getLogger(__name__)

#: Keywords of torch's checkpoint that are not the function's.
_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug")

#: Returns what holds the given parameters during one call.
WeightsOf = Callable[[Sequence[nn.Parameter]], SliceWeights]


@dataclass(frozen=True)
class Batch:
    """The batch of one forward pass: its sequences, and the number of slices.

    A packed row is one sequence of several documents.
    """

    sequences: int
    count: int
    documents: Documents | None = None

    def cut(self, leaves: Leaves) -> Cut:
        """Cut the arguments of a call.

        Raises:
            CannotCut: It cannot be cut.
        """
        if self.documents is not None:
            return cut_documents(leaves, self.documents)
        return cut_batch(leaves, self.sequences, self.count)


class Slicer:
    """Runs calls in slices, while a batch is set."""

    def __init__(self, weights_of: WeightsOf) -> None:
        """Start without a batch: nothing is cut."""
        self._weights_of = weights_of
        self._batch: Batch | None = None
        self._reasons: set[tuple[str, str]] = set()
        #: Calls of checkpoint functions so far.
        self.layer_count = 0

    @property
    def batch(self) -> Batch | None:
        """The batch of the running forward pass; None outside of one, and inside a slice."""
        return self._batch

    @contextmanager
    def slicing(self, batch: Batch | None) -> Iterator[None]:
        """Within the context calls are cut into slices of this batch; None: they are not."""
        outer, self._batch = self._batch, batch
        try:
            yield
        finally:
            self._batch = outer

    def run(
        self,
        call: Callable[..., Any],
        leaves: Leaves,
        params: Sequence[nn.Parameter],
        cut: Cut,
    ) -> Any:
        """Return the output of a call for the whole batch.

        Args:
            call: Computes a slice, or the whole batch.
            leaves: Its arguments.
            params: All parameters that it uses.
            cut: How the arguments are cut.

        Raises:
            CannotCut: An output does not have the batch first.
        """
        tensors = [value for value in leaves.values if torch.is_tensor(value)]
        sliced = SlicedCall(self.whole(call), leaves, cut, self._weights_of(params))
        return sliced.run(tensors, trains=any(param.requires_grad for param in params))

    def whole(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function within which nothing is cut, in forward and when it is recomputed."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            with self.slicing(None):
                return call(*arguments, **keywords)

        return run

    def run_module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        leaves: Leaves,
        otherwise: Callable[[], Any],
    ) -> Any:
        """Return the output of a module's call in slices; that of `otherwise` if it is not cut."""
        batch = self._batch
        if batch is None or not torch.is_grad_enabled():
            return otherwise()
        try:
            _check_module(module)
            cut = batch.cut(leaves)
            return self.run(call, leaves, tuple(module.parameters()), cut)
        except CannotCut as reason:
            self.note(type(module).__name__, str(reason))
            return otherwise()

    def note(self, name: str, reason: str) -> None:
        """Log once why the calls of a module are not cut."""
        if (name, reason) not in self._reasons:
            self._reasons.add((name, reason))
            log.warning("memascend: %s computes the whole batch at once: %s", name, reason)


class SlicedCheckpoint:
    """A checkpoint function that runs a layer in slices."""

    def __init__(self, original: Callable[..., Any], slicer: Slicer) -> None:
        """Stand in for `original(function, *arguments)`, which computes what cannot be cut."""
        self.original, self._slicer = original, slicer

    def __call__(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a function of a layer."""
        if self._slicer.batch is None:
            return self.original(function, *arguments, **keywords)
        whole = self._slicer.whole(function)
        otherwise = functools.partial(self.original, whole, *arguments, **keywords)
        given = {name: one for name, one in keywords.items() if name not in _OPTIONS}
        found = _unpack(function, arguments, given)
        if found is None:
            self._slicer.note(str(function), "its function belongs to no module")
            return otherwise()
        module, call, leaves = found
        self._slicer.layer_count += 1
        return self._slicer.run_module(module, call, leaves, otherwise)


def _unpack(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[nn.Module, Callable[..., Any], Leaves] | None:
    """Return the module of a function, a function without it, and all arguments."""
    while isinstance(function, functools.partial):
        arguments = (*function.args, *arguments)
        keywords = {**function.keywords, **keywords}
        function = function.func
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if not isinstance(module, nn.Module):
        if not arguments or not isinstance(arguments[0], nn.Module):
            return None
        module, *others = arguments
        function, arguments = functools.partial(function, module), tuple(others)
    return module, function, Leaves.of(arguments, keywords)


def _check_module(module: nn.Module) -> None:
    """Raise CannotCut if the output of one sequence depends on others."""
    for one in module.modules():
        if isinstance(one, nn.modules.batchnorm._BatchNorm):
            raise CannotCut(f"{type(one).__name__} computes statistics of the batch")
