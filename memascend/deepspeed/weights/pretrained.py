"""Loading pretrained weights: what was read of their files leaves memory while loading goes on.

transformers maps every shard of a checkpoint and hands all tensors at once to its loader for ZeRO-3
models. That one gathers one module after the other and copies tensors into it, on rank 0, so that
in the end the whole checkpoint is resident, and in the page cache. Here the loader runs as it is;
the pages that it has read are let go behind it. Names, conversions and reports stay upstream's.
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

    Models whose parameters are not in our store pass through untouched, and so do state dicts that
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

    The kernel is kept from reading the shard ahead while only its header, and on the first rank its
    tensors' beginnings, are looked at. Other formats pass through untouched.
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
    """A count of what is copied into modules, which lets files go each FLUSH_BYTES."""

    def __init__(self, files: MappedFiles) -> None:
        self._files = files
        self._read_bytes = 0

    def before_copy(
        self, module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
    ) -> None:
        """Count a module's own tensors; torch calls it before it copies them from a state dict."""
        if self._read_bytes >= FLUSH_BYTES:
            self._files.drop()
            self._read_bytes = 0
        for name in (*module._parameters, *module._buffers):
            tensor = state_dict.get(prefix + name)
            if isinstance(tensor, torch.Tensor):
                self._read_bytes += tensor.nbytes


@contextlib.contextmanager
def _dropping(model: torch.nn.Module, files: MappedFiles) -> Iterator[None]:
    """Let pages of the files go while the model's modules are loaded."""
    behind = _Behind(files)
    with contextlib.ExitStack() as hooks:
        if files.mappings:
            for module in model.modules():
                register: Any = module.register_load_state_dict_pre_hook
                handle = register(behind.before_copy)
                hooks.callback(handle.remove)
        yield


def _addresses(state_dict: Mapping[str, Any]) -> Iterator[int]:
    """Yield where the tensors in host memory begin; only the first rank has any."""
    for tensor in state_dict.values():
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel():
            yield tensor.data_ptr()
