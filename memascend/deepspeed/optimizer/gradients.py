"""Gradient hooks of the ZeRO-3 optimizer: reduced partitions go to the spool, not to a flat buffer.

What arrives is added up in the same dtype, at the same micro-steps and with the same stale values
as in DeepSpeed's flat buffer; norms and the overflow verdict come from the sums of squares that the
spool finds in passing.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.kernels.overflow import scan
from memascend.streaming.gradients import GradientShard, GradientSpool


class StreamedGradients(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Overrides for the time from reduced gradient to norm; without a spool, upstream's own."""

    grad_partitions_flat_buffer: torch.Tensor | None
    #: None: DeepSpeed's flat buffer serves.
    _spool: GradientSpool | None = None

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Any]) -> Any:
        """Takes the reduced gradients of a bucket."""
        if self._spool is None:
            return super().partition_grads(params_to_release, grad_partitions)
        boundary = self.is_gradient_accumulation_boundary()
        for param, grad_partition in zip(params_to_release, grad_partitions, strict=True):
            begin = param.partition_numel() * self._get_param_partition_rank(param)
            if begin < param.ds_numel:
                self._offload_boundary_param_ids.add(param.ds_id)
                self._take_gradient(param, grad_partition.view(-1), boundary)
                if not get_accelerator().is_synchronized_device() and param.grad is not None:
                    param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None
        return []

    def _take_gradient(self, param: Any, gradient: torch.Tensor, boundary: bool) -> None:
        assert self._spool is not None
        group_index, offset, _ = self.grad_position[self.get_param_id(param)]
        chunks: list[tuple[int, torch.Tensor]] = []

        def consume(begin: int, value: torch.Tensor) -> None:
            chunks.append((begin, value.to(self.master_weights_and_grads_dtype, copy=True)))

        hands_over = boundary and not self._streams_optimizer
        shard = self._spool.put(
            self.fp32_partitioned_groups_flat[group_index].ds_id,
            offset,
            gradient.to(self.gradient_accumulation_dtype),
            accumulate=self.micro_step_id != 0,
            final=boundary,
            consume=consume if hands_over else None,
        )
        if boundary:
            self._note_norm(param, shard)
        if hands_over:
            self._hand_over(group_index, offset, chunks)

    def _finalize_offload_gradient_accumulation(self) -> None:
        """The boundary of a window whose end was not known during its backward passes."""
        if self._spool is None:
            super()._finalize_offload_gradient_accumulation()
            return
        for param in (param for group in self.fp16_groups for param in group):
            if param.ds_id not in self._offload_boundary_param_ids:
                continue
            group_index, offset, _ = self.grad_position[self.get_param_id(param)]
            name = self.fp32_partitioned_groups_flat[group_index].ds_id
            shard = self._spool.find(name, offset)
            if shard is None or shard.latest is None:
                continue
            self._spool.finish(name, offset)
            self._note_norm(param, shard)
            if not self._streams_optimizer:
                dtype = self.master_weights_and_grads_dtype
                gradient = torch.empty(shard.latest.numel, dtype=dtype)
                self._spool.get(name, offset, gradient)
                self._hand_over(group_index, offset, [(0, gradient)])

    def _note_norm(self, param: Any, shard: GradientShard) -> None:
        if shard.squares is not None:
            self.norm_for_param_grads[self.get_param_id(param)] = shard.squares**0.5

    def _hand_over(
        self, group_index: int, offset: int, chunks: list[tuple[int, torch.Tensor]]
    ) -> None:
        """Gives finished gradients to DeepSpeed's own swapper, or to its gradients in memory."""
        parameter = self.fp32_partitioned_groups_flat[group_index]
        if self._swappable_optimizer_subgroup(group_index):
            self.optimizer_swapper.swap_out_gradients(
                parameter=parameter,
                gradient_offsets=[offset + begin for begin, _ in chunks],
                gradient_tensors=[chunk for _, chunk in chunks],
            )
            return
        for begin, chunk in chunks:
            target = parameter.grad.narrow(0, offset + begin, chunk.numel())
            target.copy_(chunk, non_blocking=True)

    def _squares(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of squares as a 0-dim fp64 tensor, accumulated in fp64 as upstream's norm is."""
        config = self.attachment.runtime.config.overflow_check
        if config.enabled and value.device.type == "cpu":
            result = scan(value, sum_squares=True, threads=config.threads)
            return torch.tensor(result.sum_squares, dtype=torch.float64)
        norm: torch.Tensor = value.to(torch.float64).norm(2)
        return norm.square()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Upstream's exchange between ranks, on a verdict that stands in for the flat buffer."""
        verdict = self._verdict() if partition_gradients else None
        if verdict is None:
            return bool(super().has_overflow(partition_gradients))
        gradients = self.grad_partitions_flat_buffer
        self.grad_partitions_flat_buffer = verdict
        try:
            return bool(super().has_overflow(partition_gradients))
        finally:
            self.grad_partitions_flat_buffer = gradients

    def _verdict(self) -> torch.Tensor | None:
        """One element that is not finite exactly if some gradient element is not."""
        if self._spool is not None:
            # Where upstream keeps the buffer that this stands in for.
            return self._spool.sum_of_squares().reshape(1).to(self.device)
        check = self.attachment.runtime.overflow_check
        gradients = self.grad_partitions_flat_buffer
        if check is None or gradients is None:
            return None
        return gradients.new_tensor([float("inf") if check(gradients) else 0.0])
