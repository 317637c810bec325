"""Redirects the activation offload of DeepSpeed and transformers from host memory to the drive.

Both keep the inputs of activation checkpoints in pinned host memory, which grows with the number of
tokens. During a forward pass whose saved tensors go to the drive this is not necessary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed import comm as dist

from memascend.deepspeed.activations.forward import current
from memascend.streaming.activations.hooks import Packed, SavedTensors

log = logging.getLogger(__name__)


class CheckpointInputs:
    """Replaces DeepSpeed's offload engine for `cpu_checkpointing`."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved

    def offload_input(self, tensor: torch.Tensor) -> Packed | None:
        """Return a placeholder for an input that goes to the drive; None if the input stays."""
        return self._saved.pack_if_it_goes(tensor)

    def restore_input(self, packed: Packed) -> torch.Tensor:
        """Return the input as it was."""
        return self._saved.unpack(packed)


def wrap_offload_engine(original: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap `_get_cpu_offload_engine`, which every checkpoint calls."""

    @functools.wraps(original)
    def find() -> Any:
        saved = current.get()
        if saved is None:
            return original()
        _log_once("DeepSpeed's activation_checkpointing.cpu_checkpointing")
        return CheckpointInputs(saved)

    return find


def wrap_save_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `save_on_cpu` that transformers uses around a checkpoint."""

    @functools.wraps(original)
    def save(*arguments: Any, **keywords: Any) -> Any:
        if current.get() is None:
            return original(*arguments, **keywords)
        _log_once("transformers' offload of gradient checkpoints")
        return nullcontext()

    return save


@functools.cache
def _log_once(what: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info("memascend: %s uses the drive (memascend.activations), not host memory", what)
