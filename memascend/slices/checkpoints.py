"""Has the checkpoint functions that a model calls run layers in slices, during a forward pass.

A model may call them by a name of its own file, of a helper's file or of torch's, or keep them in a
module, as torch's CheckpointWrapper does. One that is missed computes the batch whole; if it is not
reentrant, norms in it would run in slices in forward alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from memascend.slices.layers import SlicedCheckpoint, Slicer
from memascend.slices.replaced import Replaced

#: Where transformers keeps a layer's checkpoint function.
_LAYER_FUNCTION = "_gradient_checkpointing_func"
_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"
_OF_DEEPSPEED = ("checkpoint", "non_reentrant_checkpoint")


def replace_checkpoints(replaced: Replaced, model: nn.Module, slicer: Slicer) -> None:
    """Replace the checkpoint functions that a model may call."""
    known = _known()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name == _LAYER_FUNCTION:
                is_called = callable(value) and getattr(module, "gradient_checkpointing", False)
            else:
                is_called = _is_known(value, known)
            if is_called:
                replaced.set(module, name, _sliced(value, slicer))
    own = {type(module).__module__ for module in model.modules()}
    for holder in {*own, *_holders(len(sys.modules))}:
        names: dict[str, Any] = getattr(sys.modules.get(holder), "__dict__", {})
        for name, value in list(names.items()):
            if _is_known(value, known):
                replaced.set(sys.modules[holder], name, _sliced(value, slicer))


def _known() -> list[Any]:
    """Return torch's checkpoint function, and DeepSpeed's two if they are loaded."""
    deepspeed = getattr(sys.modules.get(_DEEPSPEED), "__dict__", {})
    functions = [torch_checkpoint.checkpoint, *map(deepspeed.get, _OF_DEEPSPEED)]
    return [_original(one) for one in functions if one is not None]


def _sliced(function: Any, slicer: Slicer) -> SlicedCheckpoint:
    return SlicedCheckpoint(_original(function), slicer)


def _original(value: Any) -> Any:
    """Return a function itself where another model's pass, which runs this one, replaced it."""
    return value.original if type(value) is SlicedCheckpoint else value


def _is_known(value: Any, known: list[Any]) -> bool:
    """Return whether a value is a checkpoint function, perhaps with some keywords given.

    Any object of any library may be asked: not even its `__class__` is, which a proxy computes.
    """
    value = _original(value)
    while issubclass(type(value), functools.partial) and not value.args:
        value = value.func
    return any(value is one for one in known)


@functools.lru_cache(maxsize=1)
def _holders(file_count: int) -> tuple[str, ...]:
    """Return the files that have a name of a checkpoint function; read again if more are loaded."""
    return tuple(_find_holders(_known()))


def _find_holders(known: list[Any]) -> Iterator[str]:
    for file, holder in list(sys.modules.items()):
        values = list(getattr(holder, "__dict__", {}).values())
        if any(_is_known(value, known) for value in values):
            yield file
