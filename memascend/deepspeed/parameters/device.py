"""Answers of the device to the parameter swapper: streams, copies to it, whose memory is whose."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def stream_here() -> Any:
    """Return the current stream; None on a synchronous device."""
    accelerator = get_accelerator()
    return None if accelerator.is_synchronized_device() else accelerator.current_stream()


def on_stream(stream: Any) -> AbstractContextManager[object]:
    """Make what `stream_here` returned the current stream of a block."""
    if stream is None:
        return nullcontext()
    block: AbstractContextManager[object] = get_accelerator().stream(stream)
    return block


def start_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Start copying a host tensor to the device; None on a synchronous device."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    return tensor.to(accelerator.current_device_name(), non_blocking=True)


def shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Check if two tensors are views of one storage."""
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def slice_of_rank(param: Any, numel: int) -> torch.Tensor:
    """Return the rank's slice of a whole parameter where it is complete, else as much new memory.

    DeepSpeed then copies the slice onto itself and lets the parameter go; the slice keeps its
    memory until it is stored.
    """
    whole: torch.Tensor = param.data
    begin = numel * param.ds_zero_partition_rank
    if whole.is_contiguous() and begin + numel <= whole.numel():
        return whole.view(-1).narrow(0, begin, numel)
    return whole.new_empty(numel)


def device_shard(param: Any) -> torch.Tensor:
    """Return what is staged of a parameter on the device, to be stored."""
    shard: torch.Tensor = param.ds_tensor.data
    if shard.numel() != param.ds_tensor.ds_numel:
        raise AssertionError(f"parameter {param.ds_id} has no shard to store: it was let go")
    return shard
