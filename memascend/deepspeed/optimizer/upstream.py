"""DeepSpeed's ZeRO-3 optimizer object, by our names.

Only this class reads or writes attributes of that object, besides the hooks that optimizer.py
overrides. So all that we rely on of it is in one file, and `older_releases.py` has the differences
between releases. Each property reads the object when it is asked: many attributes exist only from
some point of its construction on. "Sub-group" and "part" are DeepSpeed's words: a number of
parameters that are stepped together, and this rank's elements of one parameter.
"""

# The object is DeepSpeed's, which has no types.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memascend.deepspeed import older_releases
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.streaming.optimizer.sub_group import Member

#: One of DeepSpeed's functions, with its arguments.
Original = Callable[[], None]
#: Returns the bytes of a tensor in order, in tensors of uint8; each is valid until the next.
ReadBytes = Callable[[], Iterator[torch.Tensor]]
#: Reason to discard work done ahead of a step.
LOADED = "a checkpoint was loaded between backward and step()"


class Upstream:
    """The state of a ZeRO-3 optimizer that our gradients, steps and checkpoints use."""

    def __init__(self, stage3: Any) -> None:
        """Wrap DeepSpeed's object, which may still be under construction."""
        self._stage3 = stage3

    # -- sub-groups ------------------------------------------------------------------------------

    @property
    def params(self) -> Sequence[Sequence[Any]]:
        """The trained parameters of each sub-group, in the order of their elements."""
        return self._stage3.fp16_groups

    @property
    def all_params(self) -> list[Any]:
        """All trained parameters, sub-group by sub-group."""
        return [param for group in self.params for param in group]

    @property
    def masters(self) -> Sequence[Any]:
        """The base optimizer's parameter for each sub-group; `ds_id` is the sub-group's name.

        It has the master weights of this rank if they are in memory, otherwise no elements.
        """
        return self._stage3.fp32_partitioned_groups_flat

    @property
    def names(self) -> list[str]:
        """The name of each sub-group."""
        return [master.ds_id for master in self.masters]

    @property
    def numels(self) -> Sequence[int]:
        """Elements of each sub-group on this rank."""
        return self._stage3.fp16_partitioned_groups_flat_numel

    @property
    def flats(self) -> Sequence[torch.Tensor | None]:
        """The parameters of each sub-group as one flat tensor; None if they are on the drive."""
        return self._stage3.fp16_partitioned_groups_flat

    def members(self, number: int) -> list[Member]:
        """Return where the parameters of a sub-group are."""
        flat = self.flats[number]
        if flat is not None:
            return [Member(offset=0, numel=flat.numel(), dtype=flat.dtype, tensor=flat)]
        members = []
        offset = 0
        for param in self.params[number]:
            shard = param.ds_tensor
            swapper = swapper_of(param) if shard.final_location == "nvme" else None
            members.append(
                Member(
                    offset=offset,
                    numel=shard.ds_numel,
                    dtype=shard.dtype,
                    key=None if swapper is None else swapper.key(param),
                    tensor=shard.data.view(-1) if swapper is None else None,
                )
            )
            offset += shard.ds_numel
        return members

    def position_of(self, param: Any) -> tuple[int, int, int]:
        """Return (number of the sub-group, first element in it, elements) of a parameter's part."""
        return self._stage3.grad_position[self._id(param)]

    def part_begin(self, param: Any, part_numel: int) -> int:
        """Return the first element of this rank's part; from the parameter's end on is padding."""
        return part_numel * older_releases.partition_rank(self._stage3, param)

    def name_of(self, param: Any) -> str:
        """Return the name of a parameter in the model."""
        return self._stage3.param_names[param]

    def _id(self, param: Any) -> int:
        return self._stage3.get_param_id(param)

    # -- parameters ------------------------------------------------------------------------------

    @property
    def process_group(self) -> Any:
        """The ranks that share the parameters."""
        return self._stage3.dp_process_group

    def partition_parameters(self) -> None:
        """Partition all parameters: those that are gathered have the values before a change."""
        self._stage3._partition_all_parameters()

    @property
    def module(self) -> torch.nn.Module:
        """The model."""
        return self._stage3.module

    @property
    def parameter_swapper(self) -> ParameterSwapper | None:
        """Our parameter swapper; None without offloaded parameters or with the stock swapper."""
        first = next((param for group in self.params for param in group), None)
        return None if first is None else swapper_of(first)

    def wait_writes(self) -> None:
        """Wait until our parameter swapper has written all shards, if there is one."""
        if (swapper := self.parameter_swapper) is not None:
            swapper.synchronize_writes()

    def drop_unused_shards(self) -> None:
        """Release shards that were read ahead and not used."""
        if (swapper := self.parameter_swapper) is not None:
            swapper.drop_unused()

    @property
    def parameters_on_drive(self) -> bool:
        """Whether `offload_param.device` is "nvme"."""
        return self._stage3.params_in_nvme_and_cpu

    @property
    def pins_parameters(self) -> bool:
        """Whether parameters in host memory are page-locked."""
        return self._stage3.offload_param_pin_memory

    @property
    def cpu_numel_max(self) -> int:
        """Elements of parameters that may stay in host memory."""
        return self._stage3.max_params_in_cpu

    @cpu_numel_max.setter
    def cpu_numel_max(self, numel: int) -> None:
        self._stage3.max_params_in_cpu = numel

    def skip_fast_init(self) -> bool:
        """Turn `fast_init` off; return whether it was on."""
        was_on: bool = self._stage3.offload_optimizer_fast_init
        self._stage3.offload_optimizer_fast_init = False
        return was_on

    def update_parameters(self, number: int) -> None:
        """Write the values of a sub-group's master weights to its parameters."""
        self._stage3._reassign_or_swap_out_partitioned_parameters(number)

    def unflatten(self, number: int) -> None:
        """Point the parameters of a sub-group into its flat tensor."""
        self._stage3._unflatten_partitioned_parameters(number)

    def refresh_parameters(self) -> None:
        """Write the values of all master weights to the parameters."""
        self._stage3.reset_swap_buffers()

    @contextmanager
    def gathering_nothing(self) -> Iterator[None]:
        """Within the context no parameter is gathered to stay on the device."""
        persistent = self._stage3.persistent_parameters
        self._stage3.persistent_parameters = []
        try:
            yield
        finally:
            self._stage3.persistent_parameters = persistent

    # -- dtypes and devices ----------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model."""
        return self._stage3.dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the shards of trained parameters."""
        flat = self.flats[0]
        return self.dtype if flat is None else flat.dtype

    @property
    def accumulation_dtype(self) -> torch.dtype:
        """Dtype in which gradients are added up."""
        return self._stage3.gradient_accumulation_dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of master weights, and of gradients in the step."""
        return self._stage3.master_weights_and_grads_dtype

    @property
    def reduction_dtype(self) -> torch.dtype:
        """Dtype in which gradients are reduced."""
        return self._stage3.communication_data_type

    def arriving_dtype_of(self, param: Any) -> torch.dtype:
        """Return the dtype that the reduced gradient of a parameter was last rounded to."""
        return older_releases.arriving_dtype(self._stage3, param)

    @property
    def reduces_quantized(self) -> bool:
        """Whether gradients are quantized to be reduced."""
        return self._stage3.all2all_process_group is not None

    @property
    def device(self) -> Any:
        """The device of the optimizer's buffers."""
        return self._stage3.device

    # -- the base optimizer ----------------------------------------------------------------------

    @property
    def base(self) -> Any:
        """The optimizer that steps the masters; it has their states."""
        return self._stage3.optimizer

    @base.setter
    def base(self, optimizer: Any) -> None:
        self._stage3.optimizer = optimizer

    def hyperparameters(self, number: int) -> Any:
        """Return the base optimizer's parameter group of a sub-group."""
        return self.base.param_groups[self.group_number(number)]

    def group_number(self, number: int) -> int:
        """Return the number of a sub-group's parameter group."""
        return self._stage3.sub_group_to_group_id[number]

    @property
    def uses_muon(self) -> bool:
        """Whether the base optimizer is DeepSpeed's Muon."""
        return older_releases.uses_muon(self._stage3)

    @contextmanager
    def masters_in_groups(self) -> Iterator[None]:
        """Within the context the base optimizer's parameter groups have the masters."""
        self._stage3._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self._stage3._clear_fp32_optimizer_param_groups()

    def remake_base(self, optimizer: Any) -> None:
        """Replace the base optimizer by one that was made over the masters."""
        self.base = optimizer
        self._stage3._clear_fp32_optimizer_param_groups()

    @property
    def offloads_states(self) -> bool:
        """Whether `offload_optimizer` is on, to the host or to a drive."""
        return self._stage3.offload_optimizer

    @property
    def states_on_drive(self) -> bool:
        """Whether `offload_optimizer.device` is "nvme"."""
        return self._stage3.swap_optimizer

    @property
    def state_swapper(self) -> Any:
        """The object that DeepSpeed asks to move master weights and states."""
        return self._stage3.optimizer_swapper

    @state_swapper.setter
    def state_swapper(self, swapper: Any) -> None:
        self._stage3.optimizer_swapper = swapper

    def is_swapped(self, number: int) -> bool:
        """Return whether master weights and states of a sub-group are on the drive."""
        return self._stage3._swappable_optimizer_subgroup(number)

    @property
    def timers(self) -> Any:
        """DeepSpeed's timers."""
        return self._stage3.timers

    # -- scaling and clipping --------------------------------------------------------------------

    @property
    def norm_max(self) -> float:
        """`gradient_clipping`: the norm to which gradients are clipped; 0: they are not."""
        return self._stage3.clip_grad

    @property
    def loss_scale(self) -> float:
        """The factor of the loss, by which a step divides gradients."""
        return float(self._stage3.loss_scale)

    def coming_loss_scale(self) -> float:
        """Return the loss scale that the coming step divides by, unless it overflows.

        DeepSpeed updates the scale before it divides. So if the scale grows at this step, the new
        one divides, though the loss was multiplied by the old one.
        """
        if self._stage3.custom_loss_scaler:
            return self.loss_scale
        scaler = copy.deepcopy(self._stage3.loss_scaler)
        scaler.consecutive_hysteresis = False  # else the copy logs its update
        scaler.update_scale(False)
        return float(scaler.cur_scale)

    def gradient_factor(self, total_norm: torch.Tensor) -> Any:
        """Return the factor by which `unscale_and_clip_grads` multiplies gradients."""
        scale = self._stage3.loss_scale
        if self.norm_max > 0.0:
            clip = ((total_norm / scale) + 1e-6) / self.norm_max
            scale = torch.clamp(clip, min=1.0) * scale
        return 1.0 / scale

    def set_scaler(self, zero_states: Any) -> None:
        """Take the loss scaler and the overflow flag of a checkpoint."""
        self._stage3.loss_scaler = zero_states["loss_scaler"]
        self._stage3.dynamic_loss_scale = zero_states["dynamic_loss_scale"]
        self._stage3.overflow = zero_states["overflow"]

    # -- gradients -------------------------------------------------------------------------------

    @property
    def micro_step(self) -> int:
        """Index of the micro-step in its window; above 0 gradients are added up."""
        return self._stage3.micro_step_id

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Within the context gradients are added up, also in the first micro-step."""
        micro_step = self.micro_step
        self._stage3.micro_step_id = max(micro_step, 1)
        try:
            yield
        finally:
            self._stage3.micro_step_id = micro_step

    @property
    def micro_step_count(self) -> int:
        """`gradient_accumulation_steps`."""
        return self._stage3.gradient_accumulation_steps

    def is_last_micro_step(self) -> bool:
        """Return whether a step follows this micro-step, as far as the engine knows."""
        return older_releases.is_boundary(self._stage3)

    def note_reduced(self, param: Any) -> None:
        """Note that a parameter got a gradient since the last step."""
        older_releases.note_reduced(self._stage3, param)

    def reduced_params(self) -> list[Any]:
        """Return the parameters that got a gradient since the last step."""
        reduced = self._stage3._offload_boundary_param_ids
        return [param for param in self.all_params if param.ds_id in reduced]

    def note_norm(self, param: Any, norm: torch.Tensor) -> None:
        """Note the norm of this rank's part of a gradient, 0-dim."""
        self._stage3.norm_for_param_grads[self._id(param)] = norm

    def norm_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the norm of a gradient as DeepSpeed finds it."""
        return self._stage3._constant_buffered_norm2(value)

    @property
    def flat_gradients(self) -> torch.Tensor | None:
        """The flat buffer of all gradients of this rank; None without one."""
        return self._stage3.grad_partitions_flat_buffer

    @contextmanager
    def flat_gradients_as(self, value: torch.Tensor) -> Iterator[None]:
        """Within the context another tensor stands for the flat buffer."""
        gradients = self.flat_gradients
        self._stage3.grad_partitions_flat_buffer = value
        try:
            yield
        finally:
            self._stage3.grad_partitions_flat_buffer = gradients

    def drop_flat_gradients(self) -> None:
        """Drop the flat buffer, and its views by parameter."""
        self._stage3.grad_partitions_flat_buffer = None
        self._stage3._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}

    @contextmanager
    def pinning_gradients(self, wanted: bool) -> Iterator[None]:
        """Within the context gradients are page-locked only if this is `wanted` too."""
        pins = self._stage3.offload_optimizer_pin_memory
        self._stage3.offload_optimizer_pin_memory = pins and wanted
        try:
            yield
        finally:
            self._stage3.offload_optimizer_pin_memory = pins

    # -- backward passes -------------------------------------------------------------------------

    @property
    def open_graph_count(self) -> int:
        """Backward graphs that were entered and have not been reduced."""
        return self._stage3._backward_active_depth

    def leave_inner_graphs(self) -> None:
        """Count only the outer one of graphs inside each other."""
        self._stage3._backward_active_depth = min(self.open_graph_count, 1)

    def continue_micro_step(self) -> None:
        """Note that the reduction that has just ended does not end the micro-step."""
        older_releases.continue_micro_step(self._stage3)

    def has_unreduced(self) -> bool:
        """Return whether gradients wait in buckets to be reduced."""
        return any(bucket.params for bucket in self._stage3.ipg_buckets.values())

    def reduce(self, param: Any) -> None:
        """Put a parameter's gradient into a bucket, as DeepSpeed's own hook does."""
        self._stage3.reduce_ready_partitions_and_remove_grads(param)

    def is_in_bucket(self, param: Any) -> bool:
        """Return whether a parameter's gradient waits in a bucket to be reduced."""
        buckets = self._stage3.ipg_buckets.values()
        return any(param is one for bucket in buckets for one in bucket.params)

    def reduce_buckets(self) -> None:
        """Reduce the gradients that wait in buckets, and store them."""
        for dtype in self._stage3.ipg_buckets:
            self._stage3._DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads(dtype)

    def widen_gradient(self, param: Any) -> None:
        """Have autograd add up a parameter's gradient in the dtype of accumulation."""
        if getattr(param, "grad_dtype", self.accumulation_dtype) != self.accumulation_dtype:
            param.grad_dtype = self.accumulation_dtype

    def drop_unreduced(self) -> None:
        """Drop gradients that wait to be reduced, and those of all parameters."""
        for bucket in self._stage3.ipg_buckets.values():
            older_releases.clear_bucket(bucket)
        for param in self.all_params:
            param.grad = None
        older_releases.end_backward_graphs(self._stage3)

    # -- single values (safe_get_*, safe_set_*) --------------------------------------------------

    def gradient_part(self, param: Any) -> tuple[torch.Tensor, int]:
        """Return this rank's part of a gradient, to be changed, and the number of its sub-group."""
        return self._stage3._get_fp32_grad_state_partition(param, False)

    def state_part(self, param: Any, state: str | None) -> tuple[torch.Tensor, int]:
        """Return this rank's part of a state, likewise; None: of the master weights."""
        return self._stage3._get_fp32_opt_state_partition(param, False, state)

    def put_back_gradient(self, number: int) -> None:
        """Store the part of a gradient that was changed."""
        self._stage3._writeback_swap_state(number, write_opt_state=False, write_gradients=True)

    def put_back_state(self, number: int) -> None:
        """Store the part of a state that was changed."""
        self._stage3._optimizer_states_and_gradient_swap_out(number)

    def gather_part(self, param: Any, part: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor from all ranks' parts of it, in the parameter's shape."""
        return self._stage3._fp32_state_allgather(param, part)

    def gather_matrix(
        self, param: Any, gradient: torch.Tensor, momentum: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both whole, from all ranks' parts, for Muon; with one rank these are views."""
        (gradient,), (momentum,) = self._stage3._partitioned_buffers_all_gather(
            [param], [gradient], self.accumulation_dtype, [momentum]
        )
        # DeepSpeed keeps buffers, of 256 MiB together, for the next matrix and beyond the step.
        self._stage3._clear_muon_allgather_buffers()
        return gradient, momentum

    # -- the end ---------------------------------------------------------------------------------

    def drop_buffers(self) -> None:
        """Drop the large host buffers, which DeepSpeed never frees."""
        self.drop_flat_gradients()
        self._stage3.param_groups_fp16_flat_cpu_memory = []
        for master in self.masters:
            master.grad = None
        self.state_swapper = None
