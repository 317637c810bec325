"""Stands in for activation checkpointing: a layer that would be checkpointed runs in slices.

A layer is a call of a checkpoint function: torch's, DeepSpeed's, or the one that transformers gives
its layers. A layer that cannot be cut is checkpointed as before, with one line in the log.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memascend.slices.attributes import Attributes
from memascend.slices.cut import SHARED_TYPES, CannotCut, Cut, Leaves, WholeCut, cut_batch
from memascend.slices.documents import Documents, cut_documents
from memascend.slices.proof import Proofs, Reasons, identity_of
from memascend.slices.routers import recorded
from memascend.slices.sliced import SlicedCall, SliceWeights

log = logging.getLogger(__name__)

#: Keywords of torch's checkpoint that are not the function's.
_OPTIONS = (
    *("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug"),
    "early_stop",
)

#: Sizes in a reason: those of images are others in each batch.
_NUMBERS = re.compile(r"\d+")

#: The class of transformers' layers.
LAYER_CLASS = "GradientCheckpointingLayer"
#: Words in a layer's type by which its state goes from token to token.
_RECURRENT = ("linear", "recurrent", "mamba", "conv")
#: Libraries whose hooks know about slices or do not mind them.
_KNOWN_HOOKS = ("deepspeed.", "memascend.", "transformers.", "accelerate.", "peft.")
#: Where torch keeps the hooks of all modules (`register_module_forward_hook` and its like).
_OF_ALL_MODULES = (
    *("_global_forward_pre_hooks", "_global_forward_hooks"),
    *("_global_backward_pre_hooks", "_global_backward_hooks"),
)

#: Returns the object that holds the given parameters during one call.
WeightsOf = Callable[[Sequence[nn.Parameter]], SliceWeights]


@dataclass(frozen=True)
class Batch:
    """The batch of one forward pass: its sequences, and the number of slices.

    A packed row is one sequence of several documents.
    """

    sequences: int
    count: int
    documents: Documents | None = None

    @property
    def slice_count_max(self) -> int:
        """The most slices that a call is cut into."""
        return self.count if self.documents is None else len(self.documents.ranges)

    def cut(self, leaves: Leaves, layer: nn.Module | None = None) -> Cut:
        """Cut the arguments of a call.

        Args:
            leaves: The arguments.
            layer: The module that is called; None if it computes each token by itself.

        Raises:
            CannotCut: It cannot be cut.
        """
        if self.documents is not None:
            if layer is not None:
                check_keeps_documents(layer)
            return cut_documents(leaves, self.documents, mixes=layer is not None)
        if layer is None:
            return cut_batch(leaves, self.sequences, self.count)
        return cut_batch(
            leaves,
            self.sequences,
            self.count,
            mixes=True,
            head_counts=_head_counts(layer),
            is_batch_first=is_of_transformers(layer),
        )


class Slicer:
    """Runs calls in slices, while a batch is set."""

    def __init__(self, weights_of: WeightsOf) -> None:
        """Start without a batch: nothing is cut."""
        self._weights_of = weights_of
        self._batch: Batch | None = None
        self._reasons: set[tuple[str, str]] = set()
        self._proofs: weakref.WeakKeyDictionary[nn.Module, Reasons] = weakref.WeakKeyDictionary()
        #: Calls of checkpoint functions that returned states so far; a loss is no layer.
        self.layer_count = 0

    @property
    def batch(self) -> Batch | None:
        """The batch of the running forward pass; None outside of one, and inside a slice."""
        return self._batch

    @contextmanager
    def slicing(self, batch: Batch | None) -> Iterator[None]:
        """Within the context calls are cut into slices of this batch; None: they are not."""
        outer = self._batch
        try:
            self._batch = batch
            yield
        finally:
            self._batch = outer

    def run(
        self,
        call: Callable[..., Any],
        leaves: Leaves,
        params: Sequence[nn.Parameter],
        cut: Cut,
        weights: SliceWeights | None = None,
        *,
        name: str,
        proofs: Proofs | None = None,
    ) -> Any:
        """Return the output of a call for the whole batch.

        Args:
            call: Computes a slice, or the whole batch.
            leaves: Its arguments.
            params: All parameters that it uses.
            cut: How the arguments are cut.
            weights: Those of the parameters, if this call has them already.
            name: The module, for the log.
            proofs: Those of the module; None: outputs are known.

        Raises:
            CannotCut: An output is no tensor.
        """
        if weights is None:
            weights = self._weights_of(params)
        tensors = [value for value in leaves.values if torch.is_tensor(value)]
        sliced = SlicedCall(self.whole(call), leaves, cut, weights, proofs)
        output = sliced.run(tensors, trains=any(param.requires_grad for param in params))
        if sliced.why_whole:
            self.note(name, sliced.why_whole)
        return output

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
        *,
        is_layer: bool,
    ) -> Any:
        """Return the output of a module's call in slices; that of `otherwise` if it is not cut.

        Args:
            module: The module.
            call: Computes a slice, or the whole batch.
            leaves: Its arguments.
            otherwise: Computes the whole batch as without slices.
            is_layer: Whether a token's output may depend on other tokens.
        """
        batch = self._batch
        if batch is None or not torch.is_grad_enabled():
            return otherwise()
        params = tuple(module.parameters())
        weights = self._weights_of(params)  # also of a call that is not cut: they are used
        attributes = Attributes(module)
        try:
            check_module(module)
            check_hooks(module)
            attributes.check_graphs()
            layer = module if is_layer else None
            cut = self.cut(
                type(module).__name__,
                leaves,
                functools.partial(_cut_call, batch, leaves, layer, attributes),
            )
            proofs = Proofs(*self.proofs_of(module, call))
            routers = recorded()
            if routers is not None:
                call = routers.outputs_of(call)
            output = self.run(
                call, leaves, params, cut, weights, name=type(module).__name__, proofs=proofs
            )
            attributes.check_kept()
            return output if routers is None else routers.take(output)
        except CannotCut as reason:
            self.note(type(module).__name__, str(reason))
            attributes.restore()
        del weights, attributes
        return otherwise()

    def proofs_of(self, module: nn.Module, call: Callable[..., Any]) -> tuple[Any, Reasons, Any]:
        """Return a module, the reasons that are known of it, and the identity of a call."""
        return module, self._proofs.setdefault(module, {}), identity_of(call)

    def cut(self, name: str, leaves: Leaves, cut: Callable[[], Cut]) -> Cut:
        """Return a cut of a call; one slice if this rank's batch cannot be cut.

        Another rank's batch may be cut, and every rank has to gather parameters and reduce
        gradients equally often.

        Args:
            name: The module, for the log.
            leaves: Its arguments.
            cut: Cuts them.

        Raises:
            CannotCut: They have other values than tensors, as on all ranks.
        """
        try:
            return cut()
        except CannotCut as reason:
            tensors = [one for one in leaves.values if torch.is_tensor(one)]
            others = [one for one in leaves.values if not torch.is_tensor(one)]
            if not tensors or not all(isinstance(one, SHARED_TYPES) for one in others):
                raise
            self.note(name, str(reason))
            return WholeCut()

    def note(self, name: str, reason: str) -> None:
        """Log once why the calls of a module are not cut, whatever the numbers in the reason."""
        key = name, _NUMBERS.sub("", reason)
        if key not in self._reasons:
            self._reasons.add(key)
            log.warning("memascend: %s computes the whole batch at once: %s", name, reason)


class SlicedCheckpoint:
    """A checkpoint function that runs a layer in slices."""

    def __init__(self, original: Callable[..., Any], slicer: Slicer) -> None:
        """Stand in for `original(function, *arguments)`, which computes layers that are not cut."""
        self.original, self._slicer = original, slicer

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the original, by which torch.compile tells a layer's keywords from options."""
        return inspect.signature(self.original)

    def __call__(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run a function of a layer."""
        if self._slicer.batch is None:
            return self.original(function, *arguments, **keywords)
        whole = self._slicer.whole(function)
        otherwise = functools.partial(self.original, whole, *arguments, **keywords)
        given = {name: one for name, one in keywords.items() if name not in _OPTIONS}
        found = _unpack(function, arguments, given)
        if found is None:
            name = str(getattr(function, "__qualname__", type(function).__name__))
            self._slicer.note(name, "its function belongs to no module")
            output = otherwise()
        else:
            module, call, leaves = found
            output = self._slicer.run_module(module, call, leaves, otherwise, is_layer=True)
        self._slicer.layer_count += _has_states((arguments, keywords), output)
        return output


def _has_states(arguments: Any, output: Any) -> bool:
    """Return whether an output has the shape of an argument, as states have, and no loss."""
    shapes = {one.shape for one in _states(arguments)}
    return any(one.shape in shapes for one in _states(output))


def _states(values: Any) -> Iterator[torch.Tensor]:
    for one in tree_leaves(values):
        if torch.is_tensor(one) and one.is_floating_point() and one.dim() > 1:
            yield one


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
        if not arguments or not isinstance(arguments[0], nn.Module) or _captures(function):
            return None
        module, *others = arguments
        function, arguments = functools.partial(function, module), tuple(others)
    return module, function, Leaves.of(arguments, keywords)


def _captures(function: Any) -> bool:
    """Return whether a function has tensors of the whole batch, perhaps, beside its arguments."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing was put into it yet
            if any(map(torch.is_tensor, tree_leaves(cell.cell_contents))):
                return True
    return False


def check_module(module: nn.Module) -> None:
    """Raise CannotCut if the output of one sequence may depend on others."""
    for one in module.modules():
        name = type(one).__name__
        if isinstance(one, nn.modules.batchnorm._BatchNorm):
            raise CannotCut(f"{name} computes statistics of the batch")
        if getattr(one, "batch_first", True) is False:
            raise CannotCut(f"{name} has the batch in the second dimension (batch_first=False)")


def check_keeps_documents(module: nn.Module) -> None:
    """Raise CannotCut if tokens of a packed row may depend on others by more than attention."""
    for one in module.modules():
        if isinstance(one, nn.RNNBase | nn.modules.conv._ConvNd):
            raise CannotCut(f"{type(one).__name__} may join the documents of its row")
        kind = str(getattr(one, "layer_type", getattr(one, "block_type", "")))
        if any(word in kind for word in _RECURRENT):
            raise CannotCut(f"its {kind} may join the documents of its row")


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a layer of transformers, which is given the batch first."""
    return any(base.__name__ == LAYER_CLASS for base in type(module).__mro__)


def check_hooks(module: nn.Module) -> None:
    """Raise CannotCut if a script's hook would see slices, or parts of a gradient.

    A tensor that a hook keeps would have no graph, and a change of a gradient be made many times.
    """
    _check_known("each module", [getattr(nn.modules.module, name) for name in _OF_ALL_MODULES])
    for path, one in module.named_modules():
        hooks = (
            one._forward_pre_hooks,
            one._forward_hooks,
            one._backward_pre_hooks,
            one._backward_hooks,
        )
        _check_known(f"{type(one).__name__} {path}".rstrip(), hooks)
    for path, param in module.named_parameters():
        _check_known(path, (param._backward_hooks, param._post_accumulate_grad_hooks))


def _check_known(name: str, hooks: Sequence[Mapping[int, Any] | None]) -> None:
    for hook in (hook for group in hooks for hook in (group or {}).values()):
        if not str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS):
            raise CannotCut(f"{name} has a hook, {getattr(hook, '__qualname__', hook)}")


def _cut_call(batch: Batch, leaves: Leaves, layer: nn.Module | None, attributes: Attributes) -> Cut:
    attributes.check_rows(batch.sequences)
    return batch.cut(leaves, layer)


def _head_counts(module: nn.Module) -> frozenset[int]:
    """Return the numbers of attention heads of a layer, as its modules have them."""
    attributes = (item for one in module.modules() for item in vars(one).items())
    return frozenset(
        value for name, value in attributes if type(value) is int and "head" in name.lower()
    )
