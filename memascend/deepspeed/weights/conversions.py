"""Splits a state dict, so that a loader which merges all tensors first merges few at a time.

Since transformers 5 a checkpoint's tensors may be merged or split while they are loaded, such as
the experts of a layer. Before 5.23 every merged tensor of the checkpoint was made before the first
was loaded, in host memory, on every rank. The result of a merge depends on its own tensors alone,
so that the loader may be called for each merge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: The function of the loader's module that merges.
CONVERT = "_apply_weight_conversions_to_state_dict"


def one_at_a_time(
    loader: Callable[..., Any],
    model: torch.nn.Module,
    state_dict: Mapping[str, Any],
    load_config: Any,
) -> list[Mapping[str, Any]]:
    """Return the parts of a state dict that the loader may load by one call each.

    Args:
        loader: transformers' `_load_state_dict_into_zero3_model`.
        model: The model to load.
        state_dict: Tensors by their names in the checkpoint.
        load_config: Its `weight_mapping` lists renamings and merges. None has none.

    Returns:
        The state dict alone if it need not be split. Else the tensors that are not merged first,
        and then those of each merged tensor: a loader of all lets a merged tensor replace one that
        the checkpoint has under the same name.
    """
    convert = getattr(inspect.unwrap(loader), "__globals__", {}).get(CONVERT)
    mapping = getattr(load_config, "weight_mapping", None)
    # A generator merges one at a time by itself. A caller's own state dict may have metadata.
    if convert is None or inspect.isgeneratorfunction(convert) or type(state_dict) is not dict:
        return [state_dict]
    return _split(model, state_dict, mapping or ())


def _split(
    model: torch.nn.Module, state_dict: Mapping[str, Any], mapping: Any
) -> list[Mapping[str, Any]]:
    # The loader's own imports, in the function that merges.
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    if not converters:
        return [state_dict]
    names = dict.fromkeys(model.state_dict(), True)
    alone: dict[str, Any] = {}
    merged: dict[str, dict[str, Any]] = {}
    for key, tensor in state_dict.items():
        target, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, names
        )
        (alone if pattern is None else merged.setdefault(target, {}))[key] = tensor
    return [alone, *merged.values()]
