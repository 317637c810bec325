"""Loading pretrained weights: pages of their files are dropped while loading continues.

transformers 5 maps every shard of a checkpoint and passes all tensors at once to its loader for
ZeRO-3 models; transformers 4 passes one shard after the other. The loader gathers one module after
the other and copies tensors into it, on rank 0. At the end everything that was mapped is resident,
and in the page cache. Here the loader runs unchanged, and the pages that it has read are dropped.
Names, conversions and reports stay upstream's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from memascend.checkpoint.files import FLUSH_BYTES
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.weights.conversions import one_at_a_time
from memascend.deepspeed.weights.mapped_files import MappedFiles, read_starts


def wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace transformers' `_load_state_dict_into_zero3_model`.

    Models whose parameters are not in our store are loaded unchanged, and so are state dicts that
    are not mapped from files.
    """

    @functools.wraps(original)
    def load(
        model_to_load: torch.nn.Module,
        state_dict: Mapping[str, Any],
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        if not any(swapper_of(parameter) for parameter in model_to_load.parameters()):
            return original(model_to_load, state_dict, *arguments, **keywords)
        load_config = arguments[0] if arguments else keywords.get("load_config")
        parts = one_at_a_time(original, model_to_load, state_dict, load_config)
        with MappedFiles(_addresses(state_dict)) as files:
            behind = _Behind(files)
            with behind.watching(model_to_load):
                if len(parts) == 1:
                    return original(model_to_load, state_dict, *arguments, **keywords)
                errors: list[str] = []
                missing = set(model_to_load.state_dict())
                for part in parts:
                    found = original(model_to_load, part, *arguments, **keywords)
                    errors += found[0]
                    missing &= found[1]
                    # Every rank reads what it merges, and only the first one copies it.
                    behind.count(part.values())
                return errors, missing

    return load


def wrap_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace transformers' `load_state_dict`, which maps a shard on every rank.

    Keeps the kernel from reading the shard ahead while only its header and, on the first rank, the
    first bytes of its tensors are touched. Other formats are read unchanged.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def read(checkpoint_file: str | os.PathLike[str], *arguments: Any, **keywords: Any) -> Any:
        path = os.fspath(checkpoint_file)
        if path.endswith(".safetensors"):
            given = signature.bind(checkpoint_file, *arguments, **keywords)
            given.apply_defaults()
            read_starts(path, tensors=given.arguments["map_location"] == "cpu")
        return original(checkpoint_file, *arguments, **keywords)

    return read


class _Behind:
    """Counts the bytes read from files, and drops the files' pages each FLUSH_BYTES."""

    def __init__(self, files: MappedFiles) -> None:
        self._files = files
        self._read_bytes = 0

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Count the tensors that are copied into the model's modules."""
        with contextlib.ExitStack() as hooks:
            if self._files.mappings:
                for module in model.modules():
                    register: Any = module.register_load_state_dict_pre_hook
                    handle = register(self._before_copy)
                    hooks.callback(handle.remove)
            yield

    def count(self, tensors: Iterable[Any]) -> None:
        """Count tensors that were read or are read next, and drop what was read before."""
        if self._read_bytes >= FLUSH_BYTES:
            self._files.drop()
            self._read_bytes = 0
        self._read_bytes += sum(
            tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)
        )

    def _before_copy(
        self, module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Count a module's own tensors; torch calls this before copying them from a state dict."""
        names = (*module._parameters, *module._buffers)
        self.count(state_dict.get(prefix + name) for name in names)


def _addresses(state_dict: Mapping[str, Any]) -> Iterator[int]:
    """Yield the addresses of tensors in host memory; only the first rank has any."""
    for tensor in state_dict.values():
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel():
            yield tensor.data_ptr()
