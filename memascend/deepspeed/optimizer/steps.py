"""Steps of the ZeRO-3 optimizer over whole sub-groups, and the base of both ways of stepping.

Upstream's step loop is kept: for each sub-group it prepares, unscales, steps, writes back and
releases. Here DeepSpeed's own swapper does this with our store and memory; in tiled_steps.py all of
it happens in the optimizer step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.deepspeed.optimizer.locked import locked
from memascend.deepspeed.stock.optimizer_swapper import (
    PipelinedSwapper,
    SequentialSwapper,
    buffers_needed,
)
from memascend.errors import TornStepError
from memascend.streaming.gradients.accumulation import TilePlaces
from memascend.streaming.optimizer.sub_groups import StepIntegrity


class Steps(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Overrides that both ways of stepping share."""

    optimizer: Any
    #: Tracks whether all values belong to the same step.
    integrity: StepIntegrity
    #: Whether Adam's moments are in bf16.
    keeps_bf16_states = False

    def step(self, closure: Any = None) -> None:
        """Step as upstream.

        Raises:
            TornStepError: The last step ended half-way; load a checkpoint first.
        """
        self.integrity.check()
        super().step(closure)

    def finish_walk(self) -> None:
        """Wait until the last step is over, if it runs in the background."""

    def tile_places(self, name: str, offset: int) -> TilePlaces | None:
        """Return tile memory for a gradient of the coming step; None: write it to the drive."""
        return None

    def note_final(self, name: str, offset: int) -> None:
        """Note that a gradient is final: the coming step uses its value."""

    def forget_early(self, reason: str) -> None:
        """Discard work done ahead for the coming step: its inputs are about to change."""

    def _end_step(self) -> None:
        """Reset the state kept for the coming step."""

    def note_replayed(self, step: int, betas: tuple[float, float]) -> None:
        """Note a step that was replayed on DeepSpeed's Adam after a load."""

    def _gradient_factor(self, total_norm: torch.Tensor) -> Any:
        """Return the factor by which upstream's unscale_and_clip_grads multiplies gradients."""
        scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            scale = torch.clamp(clip, min=1.0) * self.loss_scale
        return 1.0 / scale

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Set a gradient as upstream, also for a parameter whose shard is on the drive."""
        if not param.requires_grad:
            return
        _check_local(value, param)
        if self.offload_optimizer:
            self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(
                value
            )
        part, group_index = self._get_fp32_grad_state_partition(param, False)
        part.data.copy_(value.flatten().data)
        if self._swappable_optimizer_subgroup(group_index):
            self._writeback_swap_state(group_index, write_opt_state=False, write_gradients=True)

    def set_local_hp_param(
        self, value: torch.Tensor, param: Any, optim_state_key: str | None = None
    ) -> None:
        """Set a master weight or state as upstream, also if the parameter is on the drive."""
        if not param.requires_grad:
            return
        _check_local(value, param)
        part, group_index = self._get_fp32_opt_state_partition(param, False, optim_state_key)
        part.data.copy_(value.flatten().data)
        if self._swappable_optimizer_subgroup(group_index):
            self._optimizer_states_and_gradient_swap_out(group_index)


class WholeSteps(Steps):
    """Whole sub-groups in DeepSpeed's own swapper, or in memory."""

    streams_optimizer = False

    def step(self, closure: Any = None) -> None:
        """Step as upstream; all values then belong to the same step."""
        super().step(closure)
        self.integrity.mend()

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        pipelined = offload_optimizer_config.pipeline
        needed = buffers_needed(self.optimizer, pipelined=pipelined)
        if offload_optimizer_config.buffer_count < needed:
            offload_optimizer_config = offload_optimizer_config.model_copy(
                update={"buffer_count": needed}
            )
        swapper_class = PipelinedSwapper if pipelined else SequentialSwapper
        folder = self.attachment.staging_folder(str(offload_optimizer_config.nvme_path))
        with self.attachment.serving_aio("optimizer buffers"):
            self.optimizer_swapper = swapper_class(
                swap_config=offload_optimizer_config,
                aio_config=aio_config,
                base_folder=folder,
                optimizer=self.optimizer,
                largest_numel=max(self.fp16_partitioned_groups_flat_numel),
                device=self.device,
                dtype=self.master_weights_and_grads_dtype,
                timers=self.timers,
            )
        if self.attachment.runtime.store is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _create_fp32_partitions(self) -> None:
        # Not in the arena: temporaries would keep its memory taken, and stock too leaves master
        # weights in pageable memory.
        with self.attachment.host_buffers(None):
            super()._create_fp32_partitions()

    def initialize_optimizer_states(self) -> None:
        """Initialize as upstream; gradients that stay in host memory are put in the arena."""
        with self.attachment.host_buffers(None if self.swap_optimizer else "gradients"):
            super().initialize_optimizer_states()

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Unscale as upstream, and note the factor for gradients that outlive the step."""
        super().unscale_and_clip_grads(sub_group_id, total_norm)
        if self._swappable_optimizer_subgroup(sub_group_id):
            parameter = self.fp32_partitioned_groups_flat[sub_group_id]
            factor = self._gradient_factor(total_norm)
            self.optimizer_swapper.note_gradient_factor(parameter, factor)

    def _optimizer_step(self, sub_group_id: int) -> None:
        self.integrity.note_change()
        super()._optimizer_step(sub_group_id)

    @locked  # a gradient that arrives meanwhile goes through the same buffers
    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        part, group_index = super()._get_fp32_grad_state_partition(param, release_swap_buffers)
        return self._kept(part, group_index, release_swap_buffers), group_index

    @locked
    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        part, group_index = super()._get_fp32_opt_state_partition(
            param, release_swap_buffers, optim_state_key
        )
        return self._kept(part, group_index, release_swap_buffers), group_index

    @locked
    def _writeback_swap_state(self, *arguments: Any, **keywords: Any) -> None:
        super()._writeback_swap_state(*arguments, **keywords)

    @locked
    def _optimizer_states_and_gradient_swap_out(self, *arguments: Any, **keywords: Any) -> None:
        super()._optimizer_states_and_gradient_swap_out(*arguments, **keywords)

    def _kept(self, part: torch.Tensor, group_index: int, is_released: bool) -> torch.Tensor:
        """Return a copy of `part` if it is in a swap buffer that was released.

        If the device is the CPU upstream returns a view of that buffer, which the next sub-group
        overwrites.
        """
        is_lent = is_released and self._swappable_optimizer_subgroup(group_index)
        return part.clone() if is_lent else part

    def _discard(self, swapper: Any) -> None:
        """Free the memory and the drive space of all sub-groups."""
        store = self.attachment.runtime.store
        if store is None:
            return
        swapper.swap_buffer_manager.all_buffers = []
        for swap_info in swapper.swap_params_info.values():
            for key in (*swap_info.get_swap_paths(), *swap_info.get_swap_gradient_paths()):
                store.discard(key=key)

    # -- checkpoints -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Check that all values may be saved; between steps they are already in the store.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        self.integrity.check()

    def stored(self, name: str) -> Iterator[tuple[str | None, torch.dtype, str]]:
        """Yield (state, dtype, key) of a sub-group's stored tensors; weights (None) come first."""
        swap_info = self.optimizer_swapper.swap_params_info.get(name)
        if swap_info is None:
            return  # in memory
        for number, context in enumerate(swap_info.tensors):
            # The first one is the master weights; the names of the others begin with the state.
            owner = str(context.compute_tensor.ds_id)
            state = owner.removesuffix(f"-{name}") if number > 0 else None
            yield state, self.optimizer_swapper.dtype, context.swap_path

    def begin_load(self) -> None:
        """Prepare to replace all values.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        if self.integrity.is_torn:
            raise TornStepError(
                "cannot load a checkpoint after half an optimizer step: without "
                "streaming.optimizer DeepSpeed's buffers of that step are not freed. fix: restart "
                "the program and load the checkpoint first"
            )
        self.integrity.note_change()

    def forget_states(self) -> None:
        """Drop every state; master weights stay."""
        store = self.attachment.runtime.io
        for swap_info in self.optimizer_swapper.swap_params_info.values():
            for context in swap_info.tensors[1:]:
                store.discard(key=context.swap_path)
            del swap_info.tensors[1:]
            swap_info.has_state_tensors = False

    def load_tensor(self, tensor: Any) -> None:
        """Load a LoadedTensor: the master weights of a sub-group, or one of its states."""
        parameter = self.fp32_partitioned_groups_flat[tensor.sub_group]
        states = self.optimizer.state[parameter]
        if not self._swappable_optimizer_subgroup(tensor.sub_group):
            numel = self.fp16_partitioned_groups_flat_numel[tensor.sub_group]
            value = torch.empty(numel, dtype=tensor.dtype)
            tensor.reader.fill(0, value.view(torch.uint8))
            if tensor.state is None:
                parameter.data.copy_(value)
            else:
                states[tensor.state] = value.to(parameter.device)
            return
        swap_info = self.optimizer_swapper.swap_params_info[parameter.ds_id]
        if tensor.state is not None:
            value = states[tensor.state] = torch.empty(0, dtype=tensor.dtype)
            value.ds_id = f"{tensor.state}-{parameter.ds_id}"  # type: ignore[attr-defined]
            swap_info.add_state_tensors([value])
        key = swap_info.tensors[-1 if tensor.state is not None else 0].swap_path
        numel = self.optimizer_swapper._io_aligned_numel(swap_info.numel())
        nbytes = numel * tensor.dtype.itemsize
        runtime = self.attachment.runtime
        runtime.io.reserve(key=key, nbytes=nbytes)
        runtime.staging.fill(key=key, nbytes=nbytes, source=tensor.reader.fill)


def _check_local(value: torch.Tensor, param: Any) -> None:
    """Compare lengths; upstream uses `ds_tensor`, which is empty while it is on the drive."""
    numel = param.partition_numel()
    if value.numel() != numel:
        raise ValueError(
            f"cannot set this rank's part of a parameter of shape {tuple(param.ds_shape)}: it has "
            f"{numel} elements and the value has {value.numel()}. Pass only this rank's part; "
            "safe_set_full_fp32_param and similar functions take whole tensors"
        )
