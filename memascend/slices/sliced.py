"""An autograd function that runs a call in slices of the batch, forward and backward.

Forward computes slice by slice without a graph, and saves the inputs of the whole batch. Backward
recomputes each slice and differentiates it, in ascending order, so that gradients of weights are
added up as those of as many micro-steps. Parameters are no inputs of the function: autograd adds to
them while a slice is differentiated, as in a reentrant checkpoint.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from memascend.slices.cut import CannotCut, Cut, Leaves, WholeCut
from memascend.slices.proof import Proofs
from memascend.slices.random_states import RandomState

_NO_GRAPH = (
    "a graph of gradients was asked for (create_graph=True), and layers in slices give none. fix: "
    "leave memascend.micro_batches out"
)
_NO_CHOICE = (
    "gradients of single tensors were asked for (torch.autograd.grad, or inputs= of backward), and "
    "layers in slices add to those of all their weights. fix: call backward() without inputs, or "
    "leave memascend.micro_batches out"
)
_KEPT = (
    "memascend: {name} keeps a tensor of a slice outside of its module, as a loss in a list of the "
    "script, whose gradient would be lost in slices, or in a hook on itself, which keeps memory "
    "for ever. fix: return it from the layer, detach it if it needs no gradient, keep it as an "
    "attribute of the layer, which is then left whole, or leave memascend.micro_batches out"
)


class _OtherShape(CannotCut):
    """Outputs of slices that are no parts of the batch's, on this rank at least."""


class SliceWeights(Protocol):
    """The weights that the slices of a call use."""

    def in_forward(self) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context of a forward pass; its value is called with the number of each slice.

        Raises:
            CannotCut: The slices used other weights, too. Raised where the context ends.
        """

    def in_backward(self, count: int) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context of a backward pass of so many slices, likewise."""


class SlicedCall:
    """One call of a function on a batch that is cut."""

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: Leaves,
        cut: Cut,
        weights: SliceWeights,
        proofs: Proofs | None = None,
    ) -> None:
        """Prepare a call.

        Args:
            function: Computes a slice, or the whole batch.
            leaves: Its arguments; tensors are passed to `run` again, so that autograd alone keeps
                them.
            cut: How they are cut.
            weights: Those that it uses.
            proofs: Those of the module, to which this call's is added; None: outputs are known.
        """
        self._function, self._cut, self._weights = function, cut, weights
        self._proofs = proofs
        self._name = "a call" if proofs is None else type(proofs.module).__name__
        self._places = [
            place for place, value in enumerate(leaves.values) if torch.is_tensor(value)
        ]
        self._leaves = Leaves(
            leaves.paths,
            tuple(None if torch.is_tensor(value) else value for value in leaves.values),
            leaves.spec,
        )
        self._numbers = tuple(filter(_is_number, self._leaves.values))
        self._random: list[RandomState] = []
        #: Why the batch is computed whole in the end, for its outputs; empty: it is not.
        self.why_whole = ""
        self._is_tuple = False
        self._autocast = _Autocast(
            {"cpu", *(one.device.type for one in leaves.values if torch.is_tensor(one))}
        )

    def run(self, tensors: Sequence[torch.Tensor], *, trains: bool) -> Any:
        """Return the output of the whole batch.

        Args:
            tensors: Those among the leaves.
            trains: Whether a weight wants a gradient.

        Raises:
            CannotCut: An output is no tensor. Random numbers are as before.
        """
        # Weights get their gradients also where no input wants one.
        anchor = torch.zeros((), requires_grad=trains)
        outputs = _Sliced.apply(self, anchor, *tensors)  # type: ignore[no-untyped-call]
        return outputs if self._is_tuple else outputs[0]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the outputs of the whole batch, computed without a graph."""
        self._random.clear()
        try:
            with self._weights.in_forward() as begin_slice, torch.no_grad():
                try:
                    return self._compute(begin_slice, tensors)
                except _OtherShape as reason:
                    self.why_whole = str(reason)
                # With the weights that are gathered: on other ranks the batch may be cut.
                self._random[0].restore()
                self._random.clear()
                self._cut = WholeCut()
                return self._compute(lambda _: begin_slice(1), tensors)
        except CannotCut:
            self._random[0].restore()
            raise

    def _compute(
        self, begin_slice: Callable[[int], None], tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, ...]:
        whole: list[torch.Tensor | None] = []
        kind: Any = None
        for number in range(self._cut.count):
            begin_slice(number)
            self._random.append(RandomState(tensors))
            outputs = self._call(number, [tensor.detach() for tensor in tensors], self._cut)
            if number == 0:
                whole = [self._memory_for(output) for output in outputs]
                kind = self._kind(whole)
                self._check_proof(kind)
            self._store(number, whole, outputs)
        self._prove(kind, tensors, whole)
        return tuple(whole)

    def _kind(self, whole: Sequence[torch.Tensor | None]) -> Any:
        """Return what tells this call from others of the module, apart from sizes and numbers."""
        are_shared = tuple(self._cut.is_shared(place) for place in self._places)
        dimensions = tuple(None if one is None else one.dim() for one in whole)
        flags = tuple(type(one) if _is_number(one) else one for one in self._leaves.values)
        cut = type(getattr(self._cut, "inputs", self._cut))
        return cut, self._leaves.paths, tuple(self._places), are_shared, dimensions, flags

    def _check_proof(self, kind: Any) -> None:
        """Raise _OtherShape if it is known that slices have no parts of the batch's outputs."""
        if self._proofs is not None and self._proofs.is_of(self._cut):
            reason = self._proofs.reason(kind, self._numbers)
            if reason:
                raise _OtherShape(reason)

    def _prove(
        self, kind: Any, tensors: Sequence[torch.Tensor], whole: Sequence[torch.Tensor | None]
    ) -> None:
        """Raise _OtherShape if the outputs of slices are no parts of the batch's."""
        if self._proofs is None or self._proofs.reason(kind, self._numbers) is not None:
            return
        if not self._proofs.is_of(self._cut) or self._cut.count == 1:
            return  # nothing to be proven
        proofs, detached = self._proofs, [tensor.detach() for tensor in tensors]

        def compute(cut: Cut) -> tuple[torch.Tensor | None, ...]:
            with proofs.unchanged():
                return self._call(0, detached, cut)

        try:
            is_proven = proofs.prove(self._cut, whole, detached, compute)
        except CannotCut as reason:
            self._proofs.add(kind, self._numbers, str(reason))
            raise _OtherShape(*reason.args) from reason
        if is_proven:
            self._proofs.add(kind, self._numbers, "")

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the tensors that want one; those of weights are added up."""
        found = [
            torch.zeros_like(tensor) if wants else None
            for tensor, wants in zip(tensors, wanted, strict=True)
        ]
        with self._weights.in_backward(self._cut.count) as begin_slice:
            for number in range(self._cut.count):
                begin_slice(number)
                self._check_dropped(self._backward_slice(number, tensors, gradients, found))
        return found

    def _check_dropped(self, inputs: Sequence[weakref.ref[torch.Tensor]]) -> None:
        """Raise RuntimeError if the graph of a slice is still there: a tensor of it is kept.

        Autocast keeps casts, with their graphs, until its outermost context ends, and a cycle of
        references is there until it is collected, mostly as a young one.
        """
        for drop in (torch.clear_autocast_cache, partial(gc.collect, 1), gc.collect):
            if all(one() is None for one in inputs):
                return
            drop()
        if any(one() is not None for one in inputs):
            raise RuntimeError(_KEPT.format(name=self._name))

    def _backward_slice(
        self,
        number: int,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        found: Sequence[torch.Tensor | None],
    ) -> list[weakref.ref[torch.Tensor]]:
        """Differentiate a slice; return those of its inputs that its graph begins with."""
        inputs = [
            self._cut.take(number, place, tensor.detach()).detach().requires_grad_(sum_ is not None)
            for place, tensor, sum_ in zip(self._places, tensors, found, strict=True)
        ]
        if all(sum_ is None for sum_ in found):  # behind frozen weights
            self._want_one_gradient(inputs)
        with torch.enable_grad(), self._autocast.restored(), self._random[number].restored():
            outputs = self._call_cut(number, inputs, self._cut)
        reached = [
            (output, self._cut.part(number, gradient))
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and output.requires_grad and gradient is not None
        ]
        if reached:
            torch.autograd.backward([one for one, _ in reached], [one for _, one in reached])
        for place, sum_, one in zip(self._places, found, inputs, strict=True):
            if sum_ is None or one.grad is None:
                continue
            if self._cut.is_shared(place):
                sum_.add_(one.grad)
            else:
                self._cut.take(number, place, sum_).copy_(one.grad)
        return [weakref.ref(one) for one in inputs if one.requires_grad]

    def _want_one_gradient(self, inputs: Sequence[torch.Tensor]) -> None:
        """Have the graph begin with an input, so that it is found where it is kept."""
        for place, one in zip(self._places, inputs, strict=True):
            if one.is_floating_point() and not self._cut.is_shared(place):
                one.requires_grad_()
                return

    def _call(
        self, number: int, tensors: Sequence[torch.Tensor], cut: Cut
    ) -> tuple[torch.Tensor | None, ...]:
        places = zip(self._places, tensors, strict=True)
        return self._call_cut(number, [cut.take(number, *one) for one in places], cut)

    def _call_cut(
        self, number: int, inputs: Sequence[torch.Tensor], cut: Cut
    ) -> tuple[torch.Tensor | None, ...]:
        values = [
            cut.take(number, place, value) if value is not None else None
            for place, value in enumerate(self._leaves.values)
        ]
        for place, one in zip(self._places, inputs, strict=True):
            values[place] = one
        arguments, keywords = self._leaves.call(values)
        outputs = self._function(*arguments, **keywords)
        self._is_tuple = type(outputs) is tuple
        return outputs if self._is_tuple else (outputs,)

    def _memory_for(self, output: Any) -> torch.Tensor | None:
        """Return memory for an output of the whole batch, from that of the first slice."""
        if output is None:
            return None
        if not torch.is_tensor(output):
            raise CannotCut(f"it returns a {type(output).__name__}")
        try:
            return output.new_empty(self._cut.whole_shape(0, output))
        except CannotCut as reason:
            raise _OtherShape(*reason.args) from reason

    def _store(
        self, number: int, whole: Sequence[torch.Tensor | None], outputs: Sequence[Any]
    ) -> None:
        """Copy the outputs of a slice to their parts of those of the whole batch."""
        parts = [None if one is None else self._cut.part(number, one) for one in whole]
        if list(map(_kind, parts)) != list(map(_kind, outputs)):
            raise _OtherShape("its outputs are not of the same shapes and dtypes in all slices")
        for part, output in zip(parts, outputs, strict=True):
            if part is not None:
                part.copy_(output)


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: SlicedCall, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return call.forward(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(_NO_GRAPH)
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(_NO_CHOICE)
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *ctx.call.backward(ctx.saved_tensors, wanted, gradients))


def _is_number(value: Any) -> bool:
    """Return whether a leaf may have other values in each step."""
    return isinstance(value, int | float | str) and not isinstance(value, bool)


def _kind(output: Any) -> Any:
    return (output.shape, output.dtype) if torch.is_tensor(output) else output


class _Autocast:
    """Whether autocast was on, and with which dtypes."""

    def __init__(self, device_types: set[str]) -> None:
        self._states = [
            (one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one))
            for one in device_types - {"meta"}
        ]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within the context autocast is as it was then."""
        with ExitStack() as stack:
            for device_type, enabled, dtype in self._states:
                stack.enter_context(
                    torch.autocast(
                        device_type, dtype=dtype, enabled=enabled, cache_enabled=self._caches
                    )
                )
            yield
