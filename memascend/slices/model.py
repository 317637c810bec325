"""Finds the parts of a model that run in slices, and has them do so during a forward pass.

Layers are those that are checkpointed. Beside them embeddings and norms run in slices, whose
gradients would otherwise be added up in another order, and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memascend.slices.checkpoints import replace_checkpoints
from memascend.slices.cut import Leaves
from memascend.slices.documents import Documents, find_documents
from memascend.slices.head import SlicedHead
from memascend.slices.layers import (
    LAYER_CLASS,
    Batch,
    Slicer,
    is_of_transformers,
)
from memascend.slices.replaced import Replaced
from memascend.slices.routers import are_collected

#: Inputs that have the batch first, the first one counts.
_BATCH_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids")
_ROUTERS = "output_router_logits"
#: Settings with which transformers collects values from inside of layers.
_RECORDING = ("output_attentions", _ROUTERS)
_NO_LAYERS = (
    "none of its layers is checkpointed. fix: turn activation checkpointing on "
    "(`gradient_checkpointing=True` in the Trainer, `model.gradient_checkpointing_enable()`)"
)
_EVALUATES = (
    "it is in evaluation mode with gradients on. fix: `model.train()`, without dropout in the "
    "configuration; for evaluation `torch.no_grad()`"
)
_NO_TENSOR = "none of its arguments is a tensor of sequences"
_NO_HEAD = (
    "it is none of transformers' models with a base model and one head behind it, so its loss is "
    "that of its own code"
)


class SlicedModel:
    """One model whose layers run in slices."""

    def __init__(
        self,
        module: nn.Module,
        slicer: Slicer,
        *,
        slices_head: bool,
        note_count: Callable[[int], object] = lambda _: None,
        step_count: Callable[[], int] = lambda: 0,
    ) -> None:
        """Look at a model; nothing of it changes outside of `running`.

        Args:
            module: The model.
            slicer: Runs its calls in slices.
            slices_head: Whether the head is one of them.
            note_count: Is called in each pass that is cut, with the most slices of a call.
            step_count: Returns the number of steps so far, each of which changes weights.
        """
        self._module, self._slicer, self._slices_head = module, slicer, slices_head
        self._note_count, self._step_count = note_count, step_count
        self._replaced = Replaced()

    @contextmanager
    def running(
        self,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        count_of: Callable[[int], int],
    ) -> Iterator[None]:
        """Within the context the model runs in slices if it trains.

        Args:
            arguments: The model's arguments.
            keywords: Its named ones.
            count_of: Returns the number of slices for so many sequences.
        """
        if self._slicer.batch is None:  # not within another pass of the model
            self._replaced.restore()
        if not torch.is_grad_enabled():
            yield
            return
        if not self._module.training:
            self._slicer.note(type(self._module).__name__, _EVALUATES)
            yield
            return
        sequences = batch_of(arguments, keywords)
        if sequences is None:
            self._slicer.note(type(self._module).__name__, _NO_TENSOR)
            yield
            return
        recorded = _recorded(self._module, keywords)
        if recorded is not None:
            self._slicer.note(
                type(self._module).__name__, f"{recorded} is on, which records values in its layers"
            )
            yield
            return
        documents = self._documents(keywords, count_of) if sequences == 1 else None
        # An error about memory names the number that was asked for last: that of documents.
        batch = Batch(sequences, 1 if documents else count_of(sequences), documents)
        self._note_count(batch.slice_count_max)
        try:
            self._replace()
            with self._slicer.slicing(batch):
                yield
            if self._slices_head and not any(map(_has_head, self._module.modules())):
                self._slicer.note(f"the head of {type(self._module).__name__}", _NO_HEAD)
            if self._slicer.layer_count == 0:
                self._slicer.note(type(self._module).__name__, _NO_LAYERS)
        finally:
            self._replaced.restore()

    def _documents(
        self, keywords: Mapping[str, Any], count_of: Callable[[int], int]
    ) -> Documents | None:
        """Return the documents of a packed row."""
        row = next((keywords[name] for name in _BATCH_INPUTS if name in keywords), None)
        if not torch.is_tensor(row):
            return None
        configs = [getattr(one, "config", None) for one in self._module.modules()]
        attention = {getattr(config, "_attn_implementation", None) for config in configs} - {None}
        is_flash = bool(attention) and all("flash" in str(one) for one in attention)
        keep_apart = is_flash and keywords.get("attention_mask") is None
        return find_documents(keywords, row.shape[1], count_of, keep_apart=keep_apart)

    def _replace(self) -> None:
        replaced = self._replaced
        layers = {
            module
            for module in self._module.modules()
            if is_of_transformers(module) and getattr(module, "gradient_checkpointing", False)
        }
        replace_checkpoints(replaced, self._module, self._slicer)
        for module in _beside(self._module, layers):
            replaced.set(module, "forward", _SlicedForward(module, self._slicer))
        if self._slices_head:
            for model in self._module.modules():
                if _has_head(model):
                    head = SlicedHead(
                        model, model.forward, self._slicer, replaced, self._step_count
                    )
                    replaced.set(model, "forward", head)


class _SlicedForward:
    """Stands in for the `forward` of a module."""

    def __init__(self, module: nn.Module, slicer: Slicer) -> None:
        self._module, self._original, self._slicer = module, module.forward, slicer

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        def otherwise() -> Any:
            return self._original(*arguments, **keywords)

        leaves = Leaves.of(arguments, keywords)
        if not any(
            torch.is_tensor(one) and one.requires_grad
            for one in (*self._module.parameters(), *leaves.values)
        ):
            return otherwise()  # a frozen one, which saves nothing
        return self._slicer.run_module(
            self._module, self._original, leaves, otherwise, is_layer=False
        )


def batch_of(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> int | None:
    """Return the number of sequences that a model is given; None if it is not to be seen."""
    named = [keywords[name] for name in _BATCH_INPUTS if torch.is_tensor(keywords.get(name))]
    for one in (*named, *arguments, *keywords.values()):
        if torch.is_tensor(one) and one.dim() >= 2:
            return int(one.shape[0])
    return None


def _recorded(module: nn.Module, keywords: Mapping[str, Any]) -> str | None:
    """Return the setting with which values inside of layers are collected, if one is on."""
    configs = [one.config for one in module.modules() if hasattr(one, "config")]
    names = [name for name in _RECORDING if name != _ROUTERS or not are_collected()]
    if any(_hides_outputs(type(one)) for one in module.modules()):
        names.append("output_hidden_states")
    for name in names:
        is_on = keywords.get(name)
        if is_on is None:  # older releases take the configuration's
            is_on = any(getattr(config, name, False) for config in configs)
        if is_on:
            return name
    return None


def _hides_outputs(layer: type[nn.Module]) -> bool:
    """Return whether hooks on a layer run inside its checkpoint: they would record slices.

    So before transformers wrapped the `forward` of its layers instead of `__call__`.
    """
    return any(base.__name__ == LAYER_CLASS and "__call__" in vars(base) for base in layer.__mro__)


def _beside(root: nn.Module, layers: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield embeddings and norms that are in no layer, also frozen ones and those without weights.

    A norm behind frozen weights saves its input, if that wants a gradient.
    """
    if root in layers:
        return
    is_row_wise = isinstance(root, nn.Embedding) or type(root).__name__.endswith("Norm")
    has_own = any(True for _ in root.parameters(recurse=False))
    if is_row_wise and (has_own or not root._modules):
        yield root
    for child in root.children():
        yield from _beside(child, layers)


def _has_head(model: nn.Module) -> bool:
    # Not the instance's: a wrapper of peft has the attributes of its model.
    prefix = getattr(type(model), "base_model_prefix", "")
    is_model = hasattr(model, "get_output_embeddings") and hasattr(model, "loss_type")
    return bool(prefix) and is_model and model._modules.get(prefix) is not None
