"""Device functions of the parameter swapper: streams, copies, shared memory, a rank's slice."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from memascend.deepspeed.older_releases import rank_of_part


def stream_here() -> Any:
    """Return the current stream; None on a synchronous device."""
    accelerator = get_accelerator()
    return None if accelerator.is_synchronized_device() else accelerator.current_stream()


def on_stream(stream: Any) -> AbstractContextManager[object]:
    """Return a context in which a stream is current; None, from `stream_here`: no effect."""
    if stream is None:
        return nullcontext()
    block: AbstractContextManager[object] = get_accelerator().stream(stream)
    return block


def start_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Start copying a host tensor to the device; return the copy, None on a synchronous device."""
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return None
    return tensor.to(accelerator.current_device_name(), non_blocking=True)


def shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors share a storage."""
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def slice_of_rank(param: Any, numel: int) -> torch.Tensor:
    """Return a view of the rank's slice of a gathered parameter; new memory if it has padding.

    DeepSpeed then copies the slice onto itself and releases the parameter; the view keeps the
    memory until the slice is stored.
    """
    whole: torch.Tensor = param.data
    begin = numel * rank_of_part(param)
    if whole.is_contiguous() and begin + numel <= whole.numel():
        return whole.view(-1).narrow(0, begin, numel)
    return whole.new_empty(numel)


def device_shard(param: Any) -> torch.Tensor:
    """Return a parameter's shard on the device, to be stored."""
    shard: torch.Tensor = param.ds_tensor.data
    if shard.numel() != param.ds_tensor.ds_numel:
        raise AssertionError(f"parameter {param.ds_id} has no shard to store: it was released")
    return shard
