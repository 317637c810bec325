"""Optimizer hooks of the ZeRO-3 optimizer: sub-groups are stepped in tiles and never held whole.

Upstream's step loop stays in charge: for each sub-group it prepares, unscales, steps, writes back
and releases. Here all of that happens in its optimizer step, tile by tile; what comes before only
notes values, what comes after has nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.plan.optimizers import initial_state
from memascend.streaming.optimizer import OptimizerStream
from memascend.streaming.sub_groups import Member, State, Wholeness


class StreamedOptimizer(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Overrides for sub-groups in an OptimizerStream; without one, upstream's own."""

    optimizer: Any
    #: None: DeepSpeed's swapper serves.
    _stream: OptimizerStream | None = None
    _factor: Any = 1.0
    # What an accessor gave out and may be asked to store again.
    _put_back: Callable[[], None] | None = None

    # Of whole sub-groups; None before the first step.
    _wholeness: Wholeness | None = None

    @property
    def _streams_optimizer(self) -> bool:
        return self._stream is not None

    @property
    def wholeness(self) -> Wholeness:
        """Whether all values belong to the same step."""
        if self._stream is not None:
            return self._stream.wholeness
        if self._wholeness is None:
            self._wholeness = Wholeness()
        return self._wholeness

    # -- construction ----------------------------------------------------------------------------

    def _swap_in_sub_group_to_flat_buffer(self, flat_buffer: Any, sub_group_id: int) -> None:
        """Streams the master weights of a sub-group from its parameters; the buffer stays empty."""
        if self._stream is None:
            super()._swap_in_sub_group_to_flat_buffer(flat_buffer, sub_group_id)
            return
        members = self._members(sub_group_id)

        def fill(begin: int, target: torch.Tensor) -> None:
            for member in members:
                first = max(begin, member.offset)
                count = min(begin + target.numel(), member.offset + member.numel) - first
                if count > 0:
                    part = target.narrow(0, first - begin, count)
                    self._read_member(member, first - member.offset, part)

        name = self.fp32_partitioned_groups_flat[sub_group_id].ds_id
        self._stream.create(name, self.fp16_partitioned_groups_flat_numel[sub_group_id], fill)

    def _read_member(self, member: Member, begin: int, target: torch.Tensor) -> None:
        if member.tensor is not None:
            target.copy_(member.tensor.narrow(0, begin, target.numel()))
            return
        slots = self.attachment.runtime.staging
        for chunk_begin, count in slots.chunks(target.numel(), member.dtype.itemsize):
            staged = slots.read_chunk(
                key=member.key,
                numel=count,
                dtype=member.dtype,
                offset_bytes=(begin + chunk_begin) * member.dtype.itemsize,
            )
            target.narrow(0, chunk_begin, count).copy_(staged)
            slots.give_back(staged)

    def initialize_optimizer_states(self) -> None:
        """Nothing is made ahead: gradients and moments begin as zeros that are stored nowhere."""
        if self._stream is None:
            super().initialize_optimizer_states()
        elif isinstance(self.optimizer, torch.optim.Adagrad):
            # As upstream: this class makes its states, of no elements here, when constructed.
            self.optimizer = torch.optim.Adagrad(
                self.fp32_partitioned_groups_flat, **self.optimizer.defaults
            )
            self._clear_fp32_optimizer_param_groups()

    # -- the step --------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """As upstream; refused after one that ended half-way.

        Raises:
            TornStepError: Load a checkpoint first.
        """
        self.wholeness.check()
        super().step(closure)
        self.wholeness.mend()

    def _prepare_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        if self._stream is None:
            super()._prepare_sub_group(sub_group_id, timer_names)
            return
        if sub_group_id == 0:
            # A gradient that did not reach the drive stops the step before a weight changes.
            self.attachment.runtime.staging.wait_writes()
            # Reading ahead crosses sub-groups, so all states are known before the walk.
            for other in range(len(self.fp16_groups)):
                self._make_state(other)
            self._stream.begin([flat.ds_id for flat in self.fp32_partitioned_groups_flat])

    def _make_state(self, sub_group_id: int) -> None:
        """Before a sub-group's first step: its states as the optimizer would begin them."""
        assert self._stream is not None
        parameter = self.fp32_partitioned_groups_flat[sub_group_id]
        if self._stream.has_states(parameter.ds_id):
            return
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        known = initial_state(self.optimizer, group)
        if known is None:
            return
        scalars, fills = known
        dtype = torch.float32
        if not getattr(self.optimizer, "fp32_optimizer_states", True):
            dtype = parameter.dtype
        for name, fill in fills.items():
            self._stream.add_state(parameter.ds_id, name, dtype, fill)
        self.optimizer.state[parameter] = scalars | {
            name: torch.empty(0, dtype=dtype) for name in fills
        }

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """As upstream; the factor is noted, for tiles and for gradients that outlive the step."""
        scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            scale = torch.clamp(clip, min=1.0) * self.loss_scale
        self._factor = 1.0 / scale
        if self._stream is not None:
            return
        super().unscale_and_clip_grads(sub_group_id, total_norm)
        if self._swappable_optimizer_subgroup(sub_group_id):
            parameter = self.fp32_partitioned_groups_flat[sub_group_id]
            self.optimizer_swapper.note_gradient_factor(parameter, self._factor)

    def _optimizer_step(self, sub_group_id: int) -> None:
        if self._stream is None:
            self.wholeness.note_change()
            super()._optimizer_step(sub_group_id)
            return
        parameter = self.fp32_partitioned_groups_flat[sub_group_id]
        step_whole = super()._optimizer_step

        def state() -> State:
            values: State = self.optimizer.state[parameter]
            return values

        self._stream.step(
            parameter.ds_id,
            parameter=parameter,
            state=state,
            update=lambda: step_whole(sub_group_id),
            factor=self._factor,
            members=self._members(sub_group_id),
        )

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if self._stream is None:
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        elif self.fp16_partitioned_groups_flat[sub_group_id] is not None:
            self._unflatten_partitioned_parameters(sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        if self._stream is None:
            super()._release_sub_group(sub_group_id, timer_names)

    def _post_step(self, timer_names: Any) -> None:
        if self._stream is not None:
            self._stream.drain()
        super()._post_step(timer_names)

    def reset_swap_buffers(self) -> None:
        """After a load: parameters take the values of their master weights."""
        if self._stream is None:
            super().reset_swap_buffers()
            self.wholeness.mend()
            return
        for sub_group_id, flat in enumerate(self.fp32_partitioned_groups_flat):
            self._stream.refresh(flat.ds_id, self._members(sub_group_id))
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        self._stream.drain()
        self._stream.wholeness.mend()

    def _members(self, sub_group_id: int) -> list[Member]:
        """Where the parameters of a sub-group are."""
        flat = self.fp16_partitioned_groups_flat[sub_group_id]
        if flat is not None:
            return [Member(offset=0, numel=flat.numel(), dtype=flat.dtype, tensor=flat)]
        members = []
        offset = 0
        for param in self.fp16_groups[sub_group_id]:
            shard = param.ds_tensor
            swapper = swapper_of(param)
            on_drive = shard.final_location == "nvme" and swapper is not None
            members.append(
                Member(
                    offset=offset,
                    numel=shard.ds_numel,
                    dtype=param.dtype,
                    key=swapper.key(param) if on_drive and swapper is not None else None,
                    tensor=None if on_drive else shard.data.view(-1),
                )
            )
            offset += shard.ds_numel
        return members

    # -- single values (safe_get_*, safe_set_*) --------------------------------------------------

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        if self._stream is None:
            part, group_index = super()._get_fp32_grad_state_partition(param, release_swap_buffers)
            return self._kept(part, group_index, release_swap_buffers), group_index
        group_index, offset, numel = self.grad_position[self.get_param_id(param)]
        flat = self.fp32_partitioned_groups_flat[group_index]
        spool = self.optimizer_swapper.spool
        gradient = torch.empty(numel, dtype=flat.dtype)
        spool.get(flat.ds_id, offset, gradient)
        self._put_back = lambda: spool.set(flat.ds_id, offset, gradient)
        return gradient, group_index

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        stream = self._stream
        if stream is None:
            part, group_index = super()._get_fp32_opt_state_partition(
                param, release_swap_buffers, optim_state_key
            )
            return self._kept(part, group_index, release_swap_buffers), group_index
        group_index, offset, numel = self.grad_position[self.get_param_id(param)]
        flat = self.fp32_partitioned_groups_flat[group_index]
        dtype = flat.dtype
        if optim_state_key is not None:
            dtype = self.optimizer.state[flat][optim_state_key].dtype
        value = torch.empty(numel, dtype=dtype)
        stream.get(flat.ds_id, offset, value, state=optim_state_key)
        self._put_back = lambda: stream.set(flat.ds_id, offset, value, state=optim_state_key)
        return value, group_index

    def _kept(self, part: torch.Tensor, group_index: int, is_released: bool) -> torch.Tensor:
        """A copy where `part` lies in a swap buffer that is free again and will be overwritten.

        On a device that shares memory with the host upstream hands out that very memory.
        """
        is_lent = is_released and self._swappable_optimizer_subgroup(group_index)
        return part.clone() if is_lent else part

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """As upstream, also for a parameter whose shard is on the drive."""
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
        """As upstream, also for a parameter whose shard is on the drive."""
        if not param.requires_grad:
            return
        _check_local(value, param)
        part, group_index = self._get_fp32_opt_state_partition(param, False, optim_state_key)
        part.data.copy_(value.flatten().data)
        if self._swappable_optimizer_subgroup(group_index):
            self._optimizer_states_and_gradient_swap_out(group_index)

    def _optimizer_states_and_gradient_swap_out(
        self, sub_group_id: int, timer_names: Any = None
    ) -> None:
        """Only accessors end here when the optimizer is streamed."""
        if self._stream is None:
            super()._optimizer_states_and_gradient_swap_out(sub_group_id, timer_names)
        else:
            self._store_again()

    def _writeback_swap_state(
        self, sub_group_id: int, write_opt_state: bool, write_gradients: bool
    ) -> None:
        if self._stream is None:
            super()._writeback_swap_state(sub_group_id, write_opt_state, write_gradients)
        else:
            self._store_again()

    def _store_again(self) -> None:
        put_back, self._put_back = self._put_back, None
        if put_back is not None:
            put_back()

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: list[Any]
    ) -> None:
        """As upstream, one parameter after the other."""
        if self._stream is None:
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
            return
        for param in (param for param in param_list if param.requires_grad):
            part, group_index = self._get_fp32_grad_state_partition(param, False)
            full = update_func(self._fp32_state_allgather(param, part), param)
            begin = part.numel() * self._get_param_partition_rank(param)
            # Behind the end of the tensor the partition is padding.
            flat = full.flatten()
            count = max(0, min(part.numel(), flat.numel() - begin))
            if count:
                part.narrow(0, 0, count).copy_(flat.narrow(0, begin, count))
            self._writeback_swap_state(group_index, write_opt_state=False, write_gradients=True)


def _check_local(value: torch.Tensor, param: Any) -> None:
    """Upstream asks `ds_tensor` how long it is, which has no elements while it is on the drive."""
    numel = param.partition_numel()
    if value.numel() != numel:
        raise ValueError(
            f"cannot set this rank's part of a parameter of shape {tuple(param.ds_shape)}: it has "
            f"{numel} elements and the value has {value.numel()}. Give the part alone; "
            "safe_set_full_fp32_param and its like take whole tensors"
        )
