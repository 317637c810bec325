"""DeepSpeed's optimizer swappers with their gradient gaps closed.

Stock reads whatever gradient files exist over a reused buffer: a parameter without a gradient is
then updated with the bytes of another tensor. Here every element of a sub-group that no gradient
covers reads as zero, which is what CPU offload gives.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper


def gradient_gaps(covered: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Gives (offset, length) of the elements of [0, numel) that no (offset, length) covers."""
    gaps = []
    end = 0
    for offset, length in sorted(covered):
        if offset > end:
            gaps.append((end, offset - end))
        end = max(end, offset + length)
    if end < numel:
        gaps.append((end, numel - end))
    return gaps


def fill_gradient_gaps(swap_info: Any) -> None:
    """Registers a zero gradient for each gap; one zero element stands for the whole gap."""
    gaps = _gaps_of(swap_info)
    for offset in [offset for offset, tensor in gaps.items() if not tensor.is_contiguous()]:
        del gaps[offset], swap_info.unswapped_gradients[offset]
    swapped = [(grad.offset, grad.length) for grad in swap_info.swapped_gradients.values()]
    kept = [(offset, tensor.numel()) for offset, tensor in swap_info.unswapped_gradients.items()]
    for offset, length in gradient_gaps(swapped + kept, swap_info.numel()):
        gaps[offset] = swap_info.unswapped_gradients[offset] = torch.zeros(1).expand(length)


def _gaps_of(swap_info: Any) -> dict[int, torch.Tensor]:
    """The gap gradients registered and still there; upstream forgets them after each step."""
    gaps: dict[int, torch.Tensor] = getattr(swap_info, "memascend_gaps", {})
    kept = swap_info.unswapped_gradients
    swap_info.memascend_gaps = {o: t for o, t in gaps.items() if kept.get(o) is t}
    return swap_info.memascend_gaps  # type: ignore[no-any-return]


def _forget_gaps(swap_info: Any, arriving: list[tuple[int, int]]) -> None:
    """Removes gap gradients that real ones are about to cover, in whole or in part."""
    gaps = _gaps_of(swap_info)
    for offset, tensor in list(gaps.items()):
        end = offset + tensor.numel()
        if any(offset < start + length and start < end for start, length in arriving):
            del gaps[offset], swap_info.unswapped_gradients[offset]


class _GaplessGradients:
    """Mixin over DeepSpeed's OptimizerSwapper."""

    swap_params_info: dict[str, Any]

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        """As upstream, with every gradient element defined."""
        for wanted in (parameter, async_parameter):
            swap_info = self.swap_params_info.get(wanted.ds_id) if wanted is not None else None
            if swap_info is not None:
                fill_gradient_gaps(swap_info)
        super().swap_in_optimizer_state(parameter, async_parameter)  # type: ignore[misc]

    def swap_out_gradients(
        self, parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]
    ) -> None:
        """As upstream; real gradients take the place of gaps."""
        swap_info = self.swap_params_info.get(parameter.ds_id)
        if swap_info is not None:
            lengths = [tensor.numel() for tensor in gradient_tensors]
            _forget_gaps(swap_info, list(zip(gradient_offsets, lengths, strict=True)))
        super().swap_out_gradients(parameter, gradient_offsets, gradient_tensors)  # type: ignore[misc]

    def _writeback_gradients(self, swap_info: Any, parameter: Any, aio_handle: Any) -> None:
        """As upstream; a gap that is written to becomes a real tensor first."""
        gaps = _gaps_of(swap_info)
        for offset, tensor in gaps.items():
            gaps[offset] = swap_info.unswapped_gradients[offset] = tensor.contiguous()
        super()._writeback_gradients(swap_info, parameter, aio_handle)  # type: ignore[misc]


class SequentialSwapper(_GaplessGradients, PartitionedOptimizerSwapper):  # type: ignore[misc]
    """One sub-group at a time."""


class PipelinedSwapper(_GaplessGradients, PipelinedOptimizerSwapper):  # type: ignore[misc]
    """Reads of the next and writes of the previous sub-group overlap the step."""


#: Buffers per sub-group in flight: the master weights, each state tensor, the gradient.
_STATE_COUNTS = {"Adagrad": 1, "Lion": 1, "SGD": 1}
_STATE_COUNT_DEFAULT = 2
#: The pipeline holds one sub-group being read, one being stepped and one being written.
_PIPELINE_DEPTH = 3


def buffers_needed(optimizer: Any, *, pipelined: bool) -> int:
    """How many buffers of a whole sub-group DeepSpeed's swapper takes for an optimizer."""
    name = type(optimizer).__name__
    states = next(
        (count for known, count in _STATE_COUNTS.items() if known in name), _STATE_COUNT_DEFAULT
    )
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        states += 1
    return (states + 2) * (_PIPELINE_DEPTH if pipelined else 1)
