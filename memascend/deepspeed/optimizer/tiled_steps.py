"""Steps of the ZeRO-3 optimizer in tiles: no whole sub-group is ever in memory.

Upstream's step loop is kept: for each sub-group it prepares, unscales, steps, writes back and
releases. Here all of that happens in the optimizer step, tile by tile. The calls before it only
record values, and those after it do nothing.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from deepspeed import comm as dist

from memascend.base.progress import byte_progress
from memascend.base.units import format_nbytes
from memascend.deepspeed.optimizer.behind import LOADED
from memascend.deepspeed.optimizer.early import StepsEarly
from memascend.deepspeed.optimizer.fused_adam import FusedAdam, fused_adam
from memascend.deepspeed.optimizer.locked import locked
from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.plan.optimizers import (
    initial_state,
    is_elementwise,
    state_count,
    state_dtype,
)
from memascend.deepspeed.stock.host_buffers import AbsentBuffers
from memascend.plan.bf16_moments import INEXACT, keeps_bf16
from memascend.plan.knobs import tile_sizes
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_groups import Member, SubGroups
from memascend.streaming.optimizer.tiles import Tiles, TileShape
from memascend.streaming.optimizer.updates import FusedUpdate, SubGroupStep

log = logging.getLogger(__name__)


class _PutBack(threading.local):
    """Stores the tensor that an accessor returned on this thread, which has changed it."""

    call: Callable[[], None] | None = None


class TiledSteps(StepsEarly):
    """Sub-groups in the store, stepped by an OptimizerStream."""

    streams_optimizer = True
    gradient_stream: GradientStream
    groups: SubGroups
    # Fused step; None: the optimizer steps by itself.
    _fused: FusedAdam | None = None
    # One per sub-group, for the current step; None: the optimizer steps it.
    _updates: Sequence[FusedUpdate | None] = ()
    _factor: Any = 1.0
    # Called with the bytes of master weights stored since the last call, at the start.
    _filled: Callable[[int], None] | None = None
    # One for each thread: hooks on two threads may set values at the same time.
    _put_back: _PutBack

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the shards of trained parameters."""
        flat = self.fp16_partitioned_groups_flat[0]
        dtype: torch.dtype = self.dtype if flat is None else flat.dtype
        return dtype

    # -- construction ----------------------------------------------------------------------------

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        runtime = self.attachment.runtime
        self.keeps_bf16_states = keeps_bf16(runtime.config)
        tiles = Tiles(
            store=runtime.io,
            memory=runtime.memory,
            shape=self._tile_shape(),
            new_event=runtime.new_event,
        )
        if tiles.shape.count == 1 and dist.get_rank() == 0:
            log.warning(
                "memascend: %s is not known to work element by element, so a sub-group is stepped "
                "whole; that takes %s of host memory. A smaller sub_group_size lowers it",
                type(self.optimizer).__name__,
                format_nbytes(tiles.nbytes),
            )
        self._put_back = _PutBack()
        self.groups = SubGroups(
            store=runtime.io, slots=runtime.staging, tiles=tiles, integrity=self.integrity
        )
        self.stream = OptimizerStream(
            groups=self.groups,
            tiles=tiles,
            gradient_stream=self.gradient_stream,
            take_over=None if runtime.store is None else runtime.store.take_over,
        )
        rank = dist.get_rank() if self.keeps_bf16_states else 0
        if runtime.config.streaming.optimizer.fused:
            needed = self.keeps_bf16_states
            self._fused = fused_adam(self.optimizer, tiles.shape, rank, is_needed=needed)
        if self.keeps_bf16_states and rank == 0:
            log.warning("memascend: %s", INEXACT)
        self._set_up_early(tiles)
        self.optimizer_swapper = StreamedSwapper(
            groups=self.groups, gradient_stream=self.gradient_stream, lock=runtime.lock
        )

    def _tile_shape(self) -> TileShape:
        runtime = self.attachment.runtime
        numel, count = tile_sizes(
            max(self.fp16_partitioned_groups_flat_numel),
            sum(self.fp16_partitioned_groups_flat_numel),
            is_tiled=is_elementwise(self.optimizer),
            tile_bytes=runtime.config.streaming.optimizer.tile_bytes,
        )
        if runtime.plan is not None:
            numel, count = runtime.plan.tile_numel, runtime.plan.tile_count
        gradient_dtype = master_dtype = self.master_weights_and_grads_dtype
        if self.streams_gradients:  # gradients from DeepSpeed's flat buffer are already cast
            gradient_dtype = self.gradient_accumulation_dtype
        return TileShape(
            numel=numel,
            count=count,
            state_count=state_count(self.optimizer),
            master_dtype=master_dtype,
            state_dtype=self._state_dtype(),
            gradient_dtype=gradient_dtype,
            parameter_dtype=self.stored_dtype,
            spare_count=0 if runtime.plan is None else runtime.plan.spare_count,
        )

    def _state_dtype(self) -> torch.dtype:
        master = self.master_weights_and_grads_dtype
        return state_dtype(self.optimizer, master, in_bf16=self.keeps_bf16_states)

    def _create_fp32_partitions(self) -> None:
        # Upstream allocates a buffer of a whole sub-group, which stays unused: master weights are
        # streamed.
        numels = self.fp16_partitioned_groups_flat_numel
        nbytes = sum(numels) * self.master_weights_and_grads_dtype.itemsize
        leads = dist.get_rank() == 0
        with (
            byte_progress("writing master weights", nbytes, leads=leads) as self._filled,
            AbsentBuffers(torch.empty, set(numels)),
        ):
            super()._create_fp32_partitions()

    @locked
    def _swap_in_sub_group_to_flat_buffer(self, flat_buffer: Any, sub_group_id: int) -> None:
        """Create the master weights of a sub-group from its parameters; the buffer is unused."""
        name = self.fp32_partitioned_groups_flat[sub_group_id].ds_id
        numel = self.fp16_partitioned_groups_flat_numel[sub_group_id]
        self.groups.create(name, numel, self._members(sub_group_id), self._filled)

    def initialize_optimizer_states(self) -> None:
        """Allocate nothing: gradients and moments begin as zeros, which need not be stored."""
        if isinstance(self.optimizer, torch.optim.Adagrad):
            # As upstream: Adagrad creates its states when constructed, here without elements.
            self.optimizer = torch.optim.Adagrad(
                self.fp32_partitioned_groups_flat, **self.optimizer.defaults
            )
            self._clear_fp32_optimizer_param_groups()

    def _setup_for_real_optimizer(self) -> None:
        super()._setup_for_real_optimizer()
        self.stream.drain()

    @locked
    def _discard(self, swapper: StreamedSwapper) -> None:
        """Free the memory and the drive space of all sub-groups."""
        self._discard_early()
        self.stream.forget_ahead()
        self.groups.discard()
        del self.stream, self.groups

    # -- the step --------------------------------------------------------------------------------

    @locked
    def _prepare_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        if sub_group_id == 0:
            early, reason = self._take_early()  # first: early steps use the tiles until then
            # If writing a gradient failed, raise before any weight changes.
            self.attachment.runtime.staging.wait_writes()
            # The walk reads ahead across sub-groups, so all states must exist before it.
            for other in range(len(self.fp16_groups)):
                self._make_state(other)
            self._updates = [self._fused_update(other) for other in range(len(self.fp16_groups))]
            self._behind = [] if self._may_go_behind() else None
            if None in self._updates:
                early, reason = {}, reason or "the optimizer has to make this step by itself"
            self._check_gradients(early, reason)
            self.early_tile_count += sum(map(len, early.values()))
            is_free = self._behind is not None and self._may_reorder()
            self._order = self._forward_order() if is_free else range(len(self.fp16_groups))
            self.stream.begin(self._walk_names(), early)

    def _make_state(self, sub_group_id: int) -> None:
        """Before a sub-group's first step, add the states that the optimizer would create."""
        parameter = self.fp32_partitioned_groups_flat[sub_group_id]
        if self.groups.group(parameter.ds_id).states:
            return
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        known = initial_state(self.optimizer, group)
        if known is None:
            return
        scalars, fills = known
        dtype = self._state_dtype()
        for name, fill in fills.items():
            self.groups.add_state(parameter.ds_id, name, dtype, fill)
        self.optimizer.state[parameter] = scalars | {
            name: torch.empty(0, dtype=dtype) for name in fills
        }

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Note the factor; the tiles are multiplied by it when they are stepped."""
        self._factor = self._gradient_factor(total_norm)

    @locked
    def _optimizer_step(self, sub_group_id: int) -> None:
        parameter = self.fp32_partitioned_groups_flat[sub_group_id]
        step_whole = functools.partial(super()._optimizer_step, sub_group_id)
        fused = self._updates[sub_group_id]
        step = SubGroupStep(
            name=parameter.ds_id,
            parameter=parameter,
            states=self.optimizer.state,
            update=step_whole,
            factor=self._factor,
            members=self._members(sub_group_id),
            fused=fused,
        )
        if fused is not None:
            step_whole()  # has no gradients, so it steps nothing; schedulers count the calls
        if self._behind is None:
            self.stream.step(step)
        else:
            self._behind.append(functools.partial(self.stream.step, step))

    def _fused_update(self, sub_group_id: int) -> FusedUpdate | None:
        """Return the fused update of a sub-group; None: the optimizer must step by itself.

        After one such step always None: the optimizer's running powers are then unknown.
        """
        if self._fused is None:
            return None
        parameter = self.fp32_partitioned_groups_flat[sub_group_id]
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        states = self.groups.group(parameter.ds_id).states
        values = self.optimizer.state[parameter]
        update = self._fused.of(group, values, states, sub_group_id)
        if update is None:
            self._fused = None
        return update

    def _may_go_behind(self) -> bool:
        """Return whether this step may run in the background on this rank.

        A background step may touch only the store and its tiles: not the optimizer's
        hyperparameters, staging slots or the device.
        """
        if None in self._updates or self.gradient_stream.needs_slots(
            self.gradient_accumulation_dtype
        ):
            return False
        return self._may_overlap()

    def _may_overlap(self) -> bool:
        if not self._overlaps or self.attachment.runtime.store is None:
            return False
        numbers = range(len(self.fp16_groups))
        tensors = [member.tensor for number in numbers for member in self._members(number)]
        return all(tensor is None or tensor.device.type == "cpu" for tensor in tensors)

    def _may_reorder(self) -> bool:
        """Return whether sub-groups may be stepped in any order.

        DeepSpeedCPUAdam has one running power of each beta for all sub-groups. If their betas or
        counts of steps differ, its rounding depends on the order.
        """
        flats = self.fp32_partitioned_groups_flat
        taken = {
            (*self._group(number)["betas"], int(self.optimizer.state[flat]["step"]))
            for number, flat in enumerate(flats)
        }
        return len(taken) == 1

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if self.fp16_partitioned_groups_flat[sub_group_id] is not None:
            self._unflatten_partitioned_parameters(sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        """Do nothing: no sub-group is in memory."""

    def reset_swap_buffers(self) -> None:
        """Write the values of the master weights to the parameters, after a load."""
        self.finish_walk()
        self.forget_early(LOADED)
        for sub_group_id, flat in enumerate(self.fp32_partitioned_groups_flat):
            self.stream.refresh(flat.ds_id, self._members(sub_group_id))
            self._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        self.stream.drain()

    def _members(self, sub_group_id: int) -> list[Member]:
        """Return where the parameters of a sub-group are."""
        flat = self.fp16_partitioned_groups_flat[sub_group_id]
        if flat is not None:
            return [Member(offset=0, numel=flat.numel(), dtype=flat.dtype, tensor=flat)]
        members = []
        offset = 0
        for param in self.fp16_groups[sub_group_id]:
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

    # -- single values (safe_get_*, safe_set_*) --------------------------------------------------

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        group_index, offset, numel = self.grad_position[self.get_param_id(param)]
        flat = self.fp32_partitioned_groups_flat[group_index]
        self.finish_sub_group(flat.ds_id)
        gradient = torch.empty(numel, dtype=flat.dtype)
        with self.attachment.runtime.lock:
            self.gradient_stream.get(flat.ds_id, offset, gradient)
            self.note_look()
        if not release_swap_buffers:
            put_back = functools.partial(self.gradient_stream.set, flat.ds_id, offset, gradient)
            self._put_back.call = put_back
        return gradient, group_index

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        group_index, offset, numel = self.grad_position[self.get_param_id(param)]
        flat = self.fp32_partitioned_groups_flat[group_index]
        self.finish_sub_group(flat.ds_id)
        dtype = flat.dtype
        if optim_state_key is not None:
            # The wider dtype, since DeepSpeed gathers states in fp32.
            stored = self.optimizer.state[flat][optim_state_key].dtype
            dtype = torch.promote_types(stored, dtype)
        value = torch.empty(numel, dtype=dtype)
        with self.attachment.runtime.lock:
            self.groups.get(flat.ds_id, offset, value, state=optim_state_key)
        if not release_swap_buffers:
            put_back = functools.partial(self.groups.set, flat.ds_id, offset, value)
            self._put_back.call = functools.partial(put_back, state=optim_state_key)
        return value, group_index

    def _writeback_swap_state(self, *_: Any, **__: Any) -> None:
        """Store the tensor that an accessor returned; only accessors call this."""
        put_back, self._put_back.call = self._put_back.call, None
        if put_back is not None:
            self.finish_walk()
            with self.attachment.runtime.lock:
                self.forget_early("a value was set between backward and step()")
                put_back()

    _optimizer_states_and_gradient_swap_out = _writeback_swap_state

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: list[Any]
    ) -> None:
        """Update as upstream, one parameter after the other."""
        for param in (param for param in param_list if param.requires_grad):
            part, group_index = self._get_fp32_grad_state_partition(param, False)
            full = update_func(self._fp32_state_allgather(param, part), param)
            begin = part.numel() * self._get_param_partition_rank(param)
            # Elements of the partition beyond the tensor's end are padding.
            flat = full.flatten()
            count = max(0, min(part.numel(), flat.numel() - begin))
            if count:
                part.narrow(0, 0, count).copy_(flat.narrow(0, begin, count))
            self._writeback_swap_state(group_index, write_opt_state=False, write_gradients=True)

    # -- checkpoints -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Write everything to the store: tiles in flight, and states that are still one fill value.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        self.finish_walk()
        with self.attachment.runtime.lock:
            self.groups.settle()

    def stored(self, name: str) -> Iterator[tuple[str | None, torch.dtype, str]]:
        """Yield (state, dtype, key) of a sub-group's stored tensors; weights (None) come first."""
        group = self.groups.group(name)
        yield None, self.groups.master_dtype, group.key()
        for state, dtype in group.states.items():
            yield state, dtype, group.key(state)

    def begin_load(self) -> None:
        """Prepare to replace all values; earlier errors are ignored."""
        with suppress(Exception):
            self.finish_walk()
        with suppress(Exception):
            self.forget_early(LOADED)
            self.stream.drain()
        self.integrity.note_change()

    def forget_states(self) -> None:
        """Drop every state; master weights stay."""
        self.groups.forget_states()

    def note_replayed(self, step: int, betas: tuple[float, float]) -> None:
        """Replay a step on the fused step's running powers too."""
        if self._fused is not None:
            self._fused.advance(step, betas)

    def load_tensor(self, tensor: Any) -> None:
        """Load a LoadedTensor: the master weights of a sub-group, or one of its states."""
        parameter = self.fp32_partitioned_groups_flat[tensor.sub_group]
        self.groups.load(
            parameter.ds_id, state=tensor.state, dtype=tensor.dtype, source=tensor.reader.fill
        )
        if tensor.state is not None:
            self.optimizer.state[parameter][tensor.state] = torch.empty(0, dtype=tensor.dtype)
