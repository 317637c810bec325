"""The weights of a call in slices, between autograd and DeepSpeed.

Autograd adds the gradients of the slices to `param.grad`. DeepSpeed's hook behind that addition
takes a gradient only if it is ready: `ds_grad_is_ready`, which DeepSpeed has for its own tiled
layers. It is ready in the last slice. A gradient that has more to come, of a weight that several
modules use or one module several times, is ready at the end of the backward pass.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from memascend.deepspeed.slices.held import HeldParameters
from memascend.slices.cut import CannotCut

log = logging.getLogger(__name__)


class Reduction(Protocol):
    """The methods of an optimizer's `Upstream` through which gradients go to DeepSpeed."""

    @property
    def module(self) -> torch.nn.Module:
        """The model."""

    @property
    def all_params(self) -> Sequence[Any]:
        """All parameters that the optimizer steps."""

    def reduce(self, param: Any) -> None:
        """Put a parameter's gradient into a bucket."""

    def is_in_bucket(self, param: Any) -> bool:
        """Return whether a parameter's gradient waits in a bucket to be reduced."""

    def reduce_buckets(self) -> None:
        """Reduce the gradients that wait in buckets."""

    def widen_gradient(self, param: Any) -> None:
        """Have autograd add up a parameter's gradient in the dtype of accumulation."""

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype in which gradients are added up."""


class PassGradients:
    """Gradients of one forward pass and its backward passes."""

    def __init__(
        self, reduction: Reduction, held: HeldParameters, *, by_slice: bool = False
    ) -> None:
        """Start without a pass.

        Args:
            reduction: The optimizer.
            held: The parameters that stay gathered.
            by_slice: Whether each slice's gradients are reduced, and their sums kept on the device.
        """
        self._reduction, self._held = reduction, held
        #: Sums of slices that were reduced; None: gradients are added up before the reduction.
        self.sums = SliceSums(reduction) if by_slice else None
        self._stepped = {id(param) for param in reduction.all_params}
        self._shared = _shared_parameters(reduction.module)
        self._seen: set[int] = set()
        self._waiting: weakref.WeakSet[CallWeights] = weakref.WeakSet()
        self._late: dict[int, Any] = {}
        self._has_noted_kept = False
        #: Slices of the rank with the most in this pass, if each is reduced.
        self.slice_count = 1
        #: Steps so far.
        self.step_count = 0

    def begin(self) -> None:
        """Begin a forward pass, in which no call was made yet.

        While the graph of another one waits for its backward pass, all its parameters count as
        used: both graphs may be differentiated at once.
        """
        if self._waiting:
            self._note_kept()
            return
        if self.sums is not None:
            self.sums.drop()
        self._seen.clear()
        for param in self._late.values():
            param.ds_grad_is_ready = True
        self._late = {id(param): param for param in self._shared}
        for param in self._shared:
            param.ds_grad_is_ready = False
            self._reduction.widen_gradient(param)

    def _note_kept(self) -> None:
        """Log once that a script keeps a graph of which no backward pass comes."""
        now = self.step_count
        steps = now - min((weights.step for weights in self._waiting), default=now)
        if steps > 0 and not self._has_noted_kept:
            self._has_noted_kept = True
            log.warning(
                "memascend: a forward pass of %d step(s) ago has had no backward pass, and its "
                "graph is kept. Meanwhile the gradients of the whole model stay on the device "
                "until the end of each backward pass. likely cause: the script keeps an output or "
                "a loss. fix: keep `loss.detach()`, or compute values that are only logged under "
                "`torch.no_grad()`",
                steps,
            )

    def note_step(self) -> None:
        """Note that weights have changed."""
        self.step_count += 1

    def drop(self) -> None:
        """Drop the sums of a backward pass that an error ended, and expect nothing of its graph.

        The error itself, or a cycle of references, may keep that graph alive.
        """
        if self.sums is not None:
            self.sums.drop()
        self._waiting.clear()

    def weights_of(self, params: Sequence[Any]) -> CallWeights:
        """Return the weights of a call."""
        for param in params:
            if not self.trains(param):
                continue
            is_late = id(param) in self._seen
            if is_late:
                self._late[id(param)] = param
                param.ds_grad_is_ready = False
            if is_late or self.sums is None:  # autograd adds up its gradient
                self._reduction.widen_gradient(param)
            self._seen.add(id(param))
        weights = CallWeights(params, self, self._reduction, self._held)
        self._waiting.add(weights)
        return weights

    def trains(self, param: Any) -> bool:
        """Return whether DeepSpeed takes a parameter's gradient; not if it was frozen at first."""
        return bool(param.requires_grad) and id(param) in self._stepped

    def note_backward(self, weights: CallWeights) -> None:
        """Note that the backward pass of a call begins."""
        self._waiting.discard(weights)

    def is_late(self, param: Any) -> bool:
        """Return whether a parameter's gradient has more to come than that of one call."""
        return id(param) in self._late

    def deliver_late(self) -> None:
        """Pass gradients that had more to come to DeepSpeed, at the end of a backward pass."""
        for param in self._late.values():
            if param.grad is not None:
                param.ds_grad_is_ready = True
                self._reduction.reduce(param)
                param.ds_grad_is_ready = False

    def take(
        self, params: Sequence[Any], parts: Sequence[torch.Tensor]
    ) -> tuple[Sequence[Any], Sequence[torch.Tensor]]:
        """Return the parameters whose reduced gradients are complete, with these."""
        return (params, parts) if self.sums is None else self.sums.take(params, parts)


class SliceSums:
    """Adds up this rank's parts of gradients, slice by slice, behind their reduction.

    So several ranks get the bits of as many micro-steps, whose gradients are rounded as often. The
    sums are those of one layer, on the device. A rank with fewer slices than another one reduces
    zeros for those that it lacks, in the same buckets.
    """

    def __init__(self, reduction: Reduction) -> None:
        """Start without a sum."""
        self._reduction = reduction
        self._open: frozenset[int] = frozenset()  # ids of parameters with slices to come
        self._sums: dict[int, torch.Tensor] = {}
        self._buckets: list[list[Any]] = []  # parameters that were reduced together in this slice
        self._buckets_before: list[list[Any]] = []  # and in the slice before

    def begin_slice(self, params: Sequence[Any], *, is_last: bool) -> None:
        """Begin a slice of a call with these parameters, behind the reduction of the one before."""
        self._reduction.reduce_buckets()
        self._buckets_before, self._buckets = self._buckets, []
        self._open = frozenset() if is_last else frozenset(map(id, params))

    def add_zeros(self) -> None:
        """Reduce zeros in the slice that begins, as the gradients of the slice before."""
        for number, bucket in enumerate(self._buckets_before):
            if number > 0:
                self._reduction.reduce_buckets()
            for param in bucket:
                param.grad = torch.zeros_like(param)
                self._reduction.reduce(param)

    def end(self, params: Sequence[Any]) -> None:
        """End a call; parameters that the last slice did not use get zeros from it."""
        for param in params:
            if id(param) in self._sums and param.grad is None:
                param.grad = torch.zeros_like(param)

    def drop(self) -> None:
        """Drop all sums, those of a pass that an error has ended."""
        self._open = frozenset()
        self._sums.clear()
        self._buckets, self._buckets_before = [], []

    def take(
        self, params: Sequence[Any], parts: Sequence[torch.Tensor]
    ) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the parameters whose sums are complete, with their sums; keep the others."""
        complete = []
        self._buckets.append(list(params))
        for param, part in zip(params, parts, strict=True):
            before = self._sums.pop(id(param), None)
            if before is not None:
                part = before.add_(part)
            if id(param) not in self._open:
                complete.append((param, part))
                continue
            if before is None:
                part = part.to(self._reduction.accumulation_dtype, copy=True)
            self._sums[id(param)] = part
            param.grad = None
        return [param for param, _ in complete], [part for _, part in complete]


class CallWeights:
    """The weights of one call."""

    def __init__(
        self,
        params: Sequence[Any],
        gradients: PassGradients,
        reduction: Reduction,
        held: HeldParameters,
    ) -> None:
        self._params = [param for param in params if hasattr(param, "ds_id")]
        self._trained = [param for param in params if gradients.trains(param)]
        self._gradients, self._reduction, self._held = gradients, reduction, held
        self._slice_count = gradients.slice_count
        #: Steps before the forward pass of the call.
        self.step = gradients.step_count

    @contextmanager
    def in_forward(self) -> Iterator[Callable[[int], None]]:
        """Within the context the weights stay gathered.

        Raises:
            CannotCut: Slices used other trained weights: each would bring a gradient of them.
        """
        with self._held.holding(self._params) as begin_slice:
            yield begin_slice
            others = self._held.others()
        if others:
            raise CannotCut(f"it uses weights of other modules ({', '.join(sorted(others))})")

    @contextmanager
    def in_backward(self, count: int) -> Iterator[Callable[[int], None]]:
        """Likewise; behind the last slice their gradients are passed to DeepSpeed."""
        self._gradients.note_backward(self)
        own = [param for param in self._trained if not self._gradients.is_late(param)]
        sums = self._gradients.sums
        total = count if sums is None else max(count, self._slice_count)
        with self._held.holding(self._params) as begin_slice:

            def begin(number: int) -> None:
                is_last = number == total - 1
                if sums is not None:
                    sums.begin_slice(own, is_last=is_last)
                begin_slice(number)
                for param in own:
                    param.ds_grad_is_ready = is_last or sums is not None

            try:
                yield begin
            finally:
                for param in own:
                    param.ds_grad_is_ready = True
            if sums is not None:
                for number in range(count, total):
                    begin(number)
                    sums.add_zeros()
                sums.end(own)
            # The last slice did not use them, as experts of which it has no tokens.
            for param in own:
                if param.grad is not None and not self._reduction.is_in_bucket(param):
                    self._reduction.reduce(param)


def _shared_parameters(module: torch.nn.Module) -> list[Any]:
    """Return the trained parameters in several places, as embeddings tied to the head.

    A module that two others have as theirs may be used by a layer, and outside of all layers.
    """
    count: dict[int, int] = {}
    found: dict[int, Any] = {}
    places = [child for one in module.modules() for child in one._modules.values()]
    for one in (module, *places):
        for param in one.parameters(recurse=False) if one is not None else ():
            count[id(param)] = count.get(id(param), 0) + 1
            found[id(param)] = param
    return [found[key] for key, times in count.items() if times > 1 and found[key].requires_grad]
