"""DeepSpeed's optimizer swappers with every gradient element defined, as under CPU offload.

CPU offload keeps one fp32 gradient buffer: an element that got no gradient for a step still has
the value that the last step left there, zero at first. Stock's NVMe swappers read the gradient
files that exist into a reused buffer, so a parameter without a gradient is updated with the bytes
of another tensor. Here each sub-group records its gradients (see GradientMemory), and elements that
never got one are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper

from memascend.plan.optimizers import state_count_of

GradientRun = tuple[int, int]  # offset and length in elements


def gradient_gaps(covered: list[GradientRun], numel: int) -> list[GradientRun]:
    """Return the runs of [0, numel) that no covered run touches."""
    gaps = []
    end = 0
    for offset, length in sorted(covered):
        if offset > end:
            gaps.append((end, offset - end))
        end = max(end, offset + length)
    if end < numel:
        gaps.append((end, numel - end))
    return gaps


@dataclass
class GradientMemory:
    """Gradients of a sub-group, beyond upstream's own bookkeeping; keys are offsets."""

    #: For gradients in the store, the factors of later steps. Gradients are stored as they arrived,
    #: so the factors are applied after each read.
    factors: dict[int, list[Any]] = field(default_factory=dict)
    #: Gradients too small for the store, as the last step left them; upstream drops them.
    small: dict[int, torch.Tensor] = field(default_factory=dict)
    #: Runs in which no gradient ever arrived: one zero element, expanded to the run.
    gaps: dict[int, torch.Tensor] = field(default_factory=dict)

    def complete(self, swap_info: Any) -> None:
        """Register gradients with upstream, so that they cover the whole sub-group."""
        kept = swap_info.unswapped_gradients
        for offset in self.gaps:
            kept.pop(offset, None)
        self.gaps.clear()
        for offset, tensor in self.small.items():
            kept.setdefault(offset, tensor)
        swapped = [(grad.offset, grad.length) for grad in swap_info.swapped_gradients.values()]
        covered = swapped + [(offset, tensor.numel()) for offset, tensor in kept.items()]
        for offset, length in gradient_gaps(covered, swap_info.numel()):
            self.gaps[offset] = kept[offset] = torch.zeros(1).expand(length)

    def forget(self, swap_info: Any, arriving: list[GradientRun]) -> None:
        """Drop records that overlap gradients which are about to arrive."""
        for known in (self.gaps, self.small):
            for offset, tensor in list(known.items()):
                if _overlaps((offset, tensor.numel()), arriving):
                    del known[offset]
                    swap_info.unswapped_gradients.pop(offset, None)
        for offset in list(self.factors):
            if _overlaps((offset, 1), arriving):
                del self.factors[offset]

    def apply_factors(self, swap_info: Any, gradient: torch.Tensor) -> None:
        """Multiply gradients read from the store to the values that the last step left."""
        for offset, factors in self.factors.items():
            run = gradient.narrow(0, offset, swap_info.swapped_gradients[offset].length)
            for factor in factors:
                run.mul_(factor)

    def note_factor(self, swap_info: Any, factor: Any) -> None:
        """Record that a step multiplies the whole gradient by `factor`."""
        if factor != 1.0:
            for offset in swap_info.swapped_gradients:
                self.factors.setdefault(offset, []).append(factor)

    def keep_small(self, swap_info: Any, gradient: torch.Tensor | None) -> None:
        """Copy the small gradients of a finished step, to memory reused from step to step."""
        for offset, tensor in swap_info.unswapped_gradients.items():
            if offset in self.gaps or gradient is None:
                continue
            if offset not in self.small:
                self.small[offset] = torch.empty(tensor.numel(), dtype=gradient.dtype)
            self.small[offset].copy_(gradient.narrow(0, offset, tensor.numel()))


def _overlaps(run: GradientRun, others: list[GradientRun]) -> bool:
    begin, end = run[0], run[0] + run[1]
    return any(begin < offset + length and offset < end for offset, length in others)


class _CompleteGradients:
    """Mixin over DeepSpeed's OptimizerSwapper."""

    swap_params_info: dict[str, Any]

    def _memory(self, swap_info: Any) -> GradientMemory:
        if not hasattr(swap_info, "memascend_gradients"):
            swap_info.memascend_gradients = GradientMemory()
        memory: GradientMemory = swap_info.memascend_gradients
        return memory

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        """Swap in as upstream, with every gradient element defined."""
        for wanted in (parameter, async_parameter):
            swap_info = self.swap_params_info.get(wanted.ds_id) if wanted is not None else None
            if swap_info is not None:
                self._memory(swap_info).complete(swap_info)
        super().swap_in_optimizer_state(parameter, async_parameter)  # type: ignore[misc]
        swap_info = self.swap_params_info.get(parameter.ds_id)
        if swap_info is not None and parameter.grad is not None:
            self._memory(swap_info).apply_factors(swap_info, parameter.grad)

    def swap_out_gradients(
        self, parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]
    ) -> None:
        """Swap out as upstream; arriving gradients replace the records of their elements."""
        swap_info = self.swap_params_info.get(parameter.ds_id)
        if swap_info is not None:
            lengths = [tensor.numel() for tensor in gradient_tensors]
            arriving = list(zip(gradient_offsets, lengths, strict=True))
            self._memory(swap_info).forget(swap_info, arriving)
        super().swap_out_gradients(  # type: ignore[misc]
            parameter, gradient_offsets, gradient_tensors
        )

    def note_gradient_factor(self, parameter: Any, factor: Any) -> None:
        """Record that a step multiplies a sub-group's gradient by `factor`."""
        swap_info = self.swap_params_info.get(parameter.ds_id)
        if swap_info is not None:
            self._memory(swap_info).note_factor(swap_info, factor)

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool = False) -> None:
        """Swap out as upstream, and keep small gradients beyond the step."""
        swap_info = self.swap_params_info.get(parameter.ds_id)
        if swap_info is not None:
            self._memory(swap_info).keep_small(swap_info, parameter.grad)
        super().swap_out_optimizer_state(parameter, async_swap)  # type: ignore[misc]

    def _writeback_gradients(self, swap_info: Any, parameter: Any, aio_handle: Any) -> None:
        """Write back as upstream; gaps become real tensors, and written values include factors."""
        memory = self._memory(swap_info)
        for offset, tensor in memory.gaps.items():
            swap_info.unswapped_gradients[offset] = memory.small[offset] = tensor.contiguous()
        memory.gaps.clear()
        memory.factors.clear()
        super()._writeback_gradients(swap_info, parameter, aio_handle)  # type: ignore[misc]


class SequentialSwapper(_CompleteGradients, PartitionedOptimizerSwapper):  # type: ignore[misc]
    """One sub-group at a time."""


class PipelinedSwapper(_CompleteGradients, PipelinedOptimizerSwapper):  # type: ignore[misc]
    """Reads of the next and writes of the previous sub-group overlap the step."""


#: The pipeline holds one sub-group being read, one being stepped and one being written.
_PIPELINE_DEPTH = 3


def buffers_needed(optimizer: Any, *, pipelined: bool) -> int:
    """Return how many buffers of a whole sub-group DeepSpeed's swapper needs for an optimizer.

    They hold the master weights, each state tensor and the gradient.
    """
    name = type(optimizer).__name__
    states = max(state_count_of(name, group) for group in optimizer.param_groups)
    return (states + 2) * (_PIPELINE_DEPTH if pipelined else 1)
