"""Gradient hooks of the ZeRO-3 optimizer: DeepSpeed's flat buffer, or a stream in its place.

The gradient stream accumulates in the same dtype, at the same micro-steps and with the same stale
values as the flat buffer. Norms and the overflow verdict come from the sums of squares that the
gradient stream computes while it copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.deepspeed.optimizer.locked import locked
from memascend.deepspeed.stock.host_buffers import AbsentBuffers
from memascend.streaming.gradients.accumulation import GradientShard, TilePlaces
from memascend.streaming.gradients.stream import GradientStream


class FlatGradients(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Gradients in DeepSpeed's flat buffer, which is in the arena."""

    streams_gradients = False
    grad_partitions_flat_buffer: torch.Tensor | None

    def _setup_for_real_optimizer(self) -> None:
        with self.attachment.host_buffers("gradients"):
            super()._setup_for_real_optimizer()

    def _verdict(self) -> torch.Tensor | None:
        """Return one element: inf if the flat buffer has a non-finite value, else 0.

        None: upstream must check by itself.
        """
        check = self.attachment.runtime.overflow_check
        gradients = self.grad_partitions_flat_buffer
        if check is None or gradients is None:
            return None
        return gradients.new_tensor([float("inf") if check(gradients) else 0.0])


class StreamedGradients(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Gradients in the gradient stream, from reduced partition to norm."""

    streams_gradients = True
    streams_optimizer: bool
    gradient_stream: GradientStream
    tile_places: Callable[[str, int], TilePlaces | None]
    note_final: Callable[[str, int], None]
    forget_early: Callable[[str], None]
    offload_optimizer_pin_memory: bool
    grad_partitions_flat_buffer: torch.Tensor | None
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, torch.Tensor]
    #: Torch function modes, entered until the end of `_setup_for_real_optimizer`.
    _setting_up: ExitStack

    def _setup_for_real_optimizer(self) -> None:
        """Set up as upstream; the flat buffer and its pinned copy take no memory."""
        pin_memory = self.offload_optimizer_pin_memory
        with ExitStack() as self._setting_up:
            self.offload_optimizer_pin_memory = pin_memory and not self.streams_optimizer
            super()._setup_for_real_optimizer()
        del self._setting_up
        self.offload_optimizer_pin_memory = pin_memory
        self.grad_partitions_flat_buffer = None
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}

    def initialize_optimizer_states(self) -> None:
        """Initialize as upstream, then intercept the allocation of the flat buffer.

        Not earlier: the call allocates gradients of sub-groups in memory. If there is only one
        sub-group its gradient is as large as the flat buffer, and it is used.
        """
        super().initialize_optimizer_states()
        numel = sum(p.partition_numel() for group in self.fp16_groups for p in group)
        self._setting_up.enter_context(AbsentBuffers(torch.zeros, {numel}))

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Any]) -> Any:
        """Store the reduced gradients of a bucket, after the last step has read the old ones."""
        self.attachment.runtime.background.finish()
        for param, grad_partition in zip(params_to_release, grad_partitions, strict=True):
            begin = param.partition_numel() * self._get_param_partition_rank(param)
            if begin < param.ds_numel:
                self._offload_boundary_param_ids.add(param.ds_id)
                with self.attachment.runtime.lock:  # other threads' hooks may read parameters
                    self._take_gradient(param, grad_partition.view(-1))
                if not get_accelerator().is_synchronized_device() and param.grad is not None:
                    param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def _take_gradient(self, param: Any, gradient: torch.Tensor) -> None:
        group_index, offset, _ = self.grad_position[self.get_param_id(param)]
        name = self.fp32_partitioned_groups_flat[group_index].ds_id
        is_final = self.is_gradient_accumulation_boundary()
        finished = None
        if is_final and not self.streams_optimizer:
            finished = torch.empty_like(gradient, dtype=self.master_weights_and_grads_dtype)
        shard = self.gradient_stream.put(
            name,
            offset,
            gradient.to(self.gradient_accumulation_dtype),
            accumulate=self.micro_step_id != 0,
            final=is_final,
            arrived=self._narrow_dtype(param),
            result=finished,
            places=self.tile_places(name, offset) if is_final else None,
        )
        if is_final:
            self._note_norm(param, shard)
            self.note_final(name, offset)
        if finished is not None:
            self._hand_over(group_index, offset, finished)

    def _narrow_dtype(self, param: Any) -> torch.dtype | None:
        """Return the dtype in which a gradient was reduced, if upstream widened it to accumulate.

        Else None; also without `gradient_accumulation_steps`: if the script ends a window by itself
        after one micro-step, its only gradient would be stored twice.
        """
        if self.gradient_accumulation_steps == 1 or self.all2all_process_group is not None:
            return None
        dtype = self.get_param_comm_dtype(param)
        if dtype == self.dtype:  # upstream assumes this dtype for every gradient
            dtype = torch.promote_types(dtype, param.grad.dtype)
        return dtype if dtype.itemsize < self.gradient_accumulation_dtype.itemsize else None

    @locked
    def _finalize_offload_gradient_accumulation(self) -> None:
        """Finish a window if its last backward pass was not known to be the last."""
        self.forget_early("the end of a window was stated after its backward pass")
        for param in (param for group in self.fp16_groups for param in group):
            if param.ds_id not in self._offload_boundary_param_ids:
                continue
            group_index, offset, _ = self.grad_position[self.get_param_id(param)]
            name = self.fp32_partitioned_groups_flat[group_index].ds_id
            shard = self.gradient_stream.find(name, offset)
            if shard is None or shard.is_empty:
                continue
            self.gradient_stream.finish(name, offset)
            self._note_norm(param, shard)
            if shard.latest is not None and not self.streams_optimizer:
                dtype = self.master_weights_and_grads_dtype
                gradient = torch.empty(shard.latest.numel, dtype=dtype)
                self.gradient_stream.get(name, offset, gradient)
                self._hand_over(group_index, offset, gradient)

    def _note_norm(self, param: Any, shard: GradientShard) -> None:
        if shard.squares is not None:
            self.norm_for_param_grads[self.get_param_id(param)] = shard.squares**0.5

    def _hand_over(self, group_index: int, offset: int, gradient: torch.Tensor) -> None:
        """Pass a final gradient to DeepSpeed's own swapper, or copy it to the one in memory."""
        parameter = self.fp32_partitioned_groups_flat[group_index]
        if self._swappable_optimizer_subgroup(group_index):
            self.optimizer_swapper.swap_out_gradients(
                parameter=parameter, gradient_offsets=[offset], gradient_tensors=[gradient]
            )
            return
        target = parameter.grad.narrow(0, offset, gradient.numel())
        target.copy_(gradient, non_blocking=True)

    def _verdict(self) -> torch.Tensor:
        """Return one element: finite exactly if all gradients are."""
        # Upstream's flat buffer, which this replaces, is on this device.
        with self.attachment.runtime.lock:
            total = self.gradient_stream.sum_of_squares()
        return total.reshape(1).to(self.device)
