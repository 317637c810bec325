"""Loading pretrained weights: pages of their files are dropped while loading continues.

transformers maps every shard of a checkpoint and passes all tensors at once to its loader for
ZeRO-3 models. The loader gathers one module after the other and copies tensors into it, on rank 0.
At the end the whole checkpoint is resident, and in the page cache. Here the loader runs unchanged,
and the pages that it has read are dropped. Names, conversions and reports stay upstream's.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memascend.checkpoint.files import FLUSH_BYTES
from memascend.deepspeed.parameters.gather import swapper_of
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
        with MappedFiles(_addresses(state_dict)) as files, _dropping(model_to_load, files):
            return original(model_to_load, state_dict, *arguments, **keywords)

    return load


def wrap_read(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace transformers' `load_state_dict`, which maps a shard on every rank.

    Keeps the kernel from reading the shard ahead while only its header and, on the first rank, the
    first bytes of its tensors are touched. Other formats are read unchanged.
    """

    @functools.wraps(original)
    def read(
        checkpoint_file: str | os.PathLike[str],
        map_location: Any = "cpu",
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        path = os.fspath(checkpoint_file)
        if path.endswith(".safetensors"):
            read_starts(path, tensors=map_location == "cpu")
        return original(checkpoint_file, map_location, *arguments, **keywords)

    return read


class _Behind:
    """Counts the bytes copied into modules, and drops the files' pages each FLUSH_BYTES."""

    def __init__(self, files: MappedFiles) -> None:
        self._files = files
        self._read_bytes = 0

    def before_copy(
        self, module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Count a module's own tensors; torch calls this before copying them from a state dict."""
        if self._read_bytes >= FLUSH_BYTES:
            self._files.drop()
            self._read_bytes = 0
        for name in (*module._parameters, *module._buffers):
            tensor = state_dict.get(prefix + name)
            if isinstance(tensor, torch.Tensor):
                self._read_bytes += tensor.nbytes


@contextlib.contextmanager
def _dropping(model: torch.nn.Module, files: MappedFiles) -> Iterator[None]:
    """Drop pages of the files while the model's modules are loaded."""
    behind = _Behind(files)
    with contextlib.ExitStack() as hooks:
        if files.mappings:
            for module in model.modules():
                register: Any = module.register_load_state_dict_pre_hook
                handle = register(behind.before_copy)
                hooks.callback(handle.remove)
        yield


def _addresses(state_dict: Mapping[str, Any]) -> Iterator[int]:
    """Yield the addresses of tensors in host memory; only the first rank has any."""
    for tensor in state_dict.values():
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel():
            yield tensor.data_ptr()
