"""DeepSpeed's ZeRO-3 optimizer with its hooks replaced; the step loop is DeepSpeed's own.

The only subclass of DeepSpeed's class. Each override passes the call to a member, and where it
extends DeepSpeed's own function that function too. The members see DeepSpeed's object through
`Upstream`: gradients are streamed or in DeepSpeed's flat buffer, steps are made in tiles or with
whole sub-groups, as `choose_streams` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.config.block import active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.attach.lone_failure import noting
from memascend.deepspeed.optimizer.checkpoint import CheckpointHooks
from memascend.deepspeed.optimizer.choice import StepPath, choose_streams, reduction_of_sums
from memascend.deepspeed.optimizer.construction import Construction
from memascend.deepspeed.optimizer.gradients import FlatGradients, GradientPath, StreamedGradients
from memascend.deepspeed.optimizer.passes import PassHooks
from memascend.deepspeed.optimizer.refusals import refusal_of_call, refuse
from memascend.deepspeed.optimizer.tiled import TiledSteps
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.optimizer.values import Part, set_local_gradient, set_local_state
from memascend.deepspeed.optimizer.whole import WholeSteps
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.plan.optimizers import named_as


class ZeroOptimizer(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Replaces DeepSpeedZeroOptimizer_Stage3."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Return a stock optimizer if there is no active block."""
        names = ("module", "init_optimizer", "param_names", "timers", "ds_config")
        given = dict(zip(names, arguments, strict=False)) | keywords
        if given and active_config(given.get("ds_config")) is None:
            return DeepSpeedZeroOptimizer_Stage3(*arguments, **keywords)
        return super().__new__(cls)  # copy.copy calls without arguments

    def __init__(
        self,
        module: torch.nn.Module,
        init_optimizer: Any,
        param_names: Any,
        timers: Any,
        ds_config: Any,
        **keywords: Any,
    ) -> None:
        config = active_config(ds_config)
        assert config is not None
        given = keywords | {"init_optimizer": init_optimizer}
        streams_gradients, is_tiled = choose_streams(config, given)
        self.settings = named_as(parse_deepspeed(ds_config), init_optimizer)
        refuse(module, init_optimizer)
        self.upstream = upstream = Upstream(self)
        self._construction = Construction(upstream, config, self.settings)
        attach = self._construction.attach
        in_fp32 = reduction_of_sums(config, self.settings)
        self.steps: StepPath = (
            TiledSteps(
                upstream,
                attach,
                streams_gradients=streams_gradients,
                communicated=keywords.get("communication_data_type") if in_fp32 else None,
            )
            if is_tiled
            else WholeSteps(upstream, attach)
        )
        self.gradients: GradientPath = (
            StreamedGradients(upstream, attach, self.steps)
            if streams_gradients
            else FlatGradients(upstream, attach)
        )
        self.passes = PassHooks(upstream, self.steps.restart)
        self.checkpoint = CheckpointHooks(upstream, attach, self.steps)
        keywords |= in_fp32
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **keywords)

    @property
    def attachment(self) -> Attachment:
        """The model's attachment."""
        return self._construction.attach()

    def finish_walk(self) -> None:
        """Wait until the last step has written every value. Any thread may call.

        Raises:
            StoreError: The step failed; raised once.
        """
        self.steps.finish()

    # -- construction ----------------------------------------------------------------------------

    def _configure_offloading(self, optimizer_config: Any, param_config: Any) -> None:
        super()._configure_offloading(optimizer_config, param_config)
        self._construction.decide_offloading()

    def _configure_tensor_swapping(self, offload_config: Any, aio_config: Any) -> None:
        self._construction.open_streams(
            streams_gradients=self.gradients.is_streamed, is_tiled=self.steps.is_tiled
        )
        self.steps.configure(offload_config, aio_config)

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        self._construction.set_up_parameters(super()._create_param_groups_fp16_flat_cpu_memory)

    def _setup_for_real_optimizer(self) -> None:
        self.gradients.set_up(super()._setup_for_real_optimizer)
        self.steps.end_setup()
        self.upstream.wait_writes()
        for swapper in set(map(swapper_of, self.upstream.all_params)):
            if swapper is not None:
                swapper.watch_gathers(self.check_values)

    def check_values(self) -> None:
        """Refuse parameters of a torn step; a load may gather some before it mends it.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        if not self.checkpoint.is_active:
            self.steps.values.check()

    def _create_fp32_partitions(self) -> None:
        self.steps.create_masters(super()._create_fp32_partitions)

    def _swap_in_sub_group_to_flat_buffer(self, flat_buffer: Any, sub_group_id: int) -> None:
        original = super()._swap_in_sub_group_to_flat_buffer
        self.steps.create_master(sub_group_id, partial(original, flat_buffer, sub_group_id))

    def initialize_optimizer_states(self) -> None:
        """Initialize the states, and prepare for the buffer of gradients."""
        original = super().initialize_optimizer_states
        self.gradients.initialize(partial(self.steps.initialize_states, original))

    # -- backward --------------------------------------------------------------------------------

    def clear_backward_seen_flag(self) -> None:
        """Begin a forward pass; DeepSpeed has this hook since 0.18.5."""
        reduce = self._reduce_rest
        original = getattr(super(), "clear_backward_seen_flag", _do_nothing)
        self.passes.begin_forward(original, reduce)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Restart the window of micro-steps."""
        self.passes.restart_window(partial(super().zero_grad, set_to_none))

    def enter_backward(self) -> None:
        """Begin a backward pass."""
        self.passes.begin_backward(super().enter_backward)

    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """Put a gradient into a bucket once it is ready.

        For one that is not, DeepSpeed may flush the bucket: ranks with other numbers of slices
        would reduce other buckets.
        """
        if self.passes.slices is None or getattr(param, "ds_grad_is_ready", True):
            super().reduce_ready_partitions_and_remove_grads(param)

    def independent_gradient_partition_epilogue(self) -> None:
        """End a backward pass."""
        self.passes.end_backward(self._reduce_rest)

    def _reduce_rest(self) -> None:
        """Reduce the gradients that buckets hold, and wait until all are stored."""
        self.steps.current.note_pass()
        super().independent_gradient_partition_epilogue()
        self.gradients.finish_pass()

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Any]) -> Any:
        """Store the reduced gradients of a bucket."""
        store = partial(self.gradients.put, original=super().partition_grads)
        return self.passes.put(params_to_release, grad_partitions, store)

    def _finalize_offload_gradient_accumulation(self) -> None:
        self.gradients.end_window(super()._finalize_offload_gradient_accumulation)

    # -- a step ----------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Step as DeepSpeed.

        Raises:
            IncompleteGradientError: The last backward pass failed, or was not reduced.
            TornStepError: The last step ended half-way; load a checkpoint first.
        """
        self.passes.check()
        with noting(self.attachment.failures):
            self.steps.step(partial(super().step, closure))
        if self.passes.slices is not None:
            self.passes.slices.note_step()

    def _partition_all_parameters(self) -> None:
        """Partition as DeepSpeed, and release shards that were read ahead and not used.

        A step or a load follows and changes the parameters on the drive; a shard read before would
        be stale.
        """
        super()._partition_all_parameters()
        self.upstream.drop_unused_shards()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any rank overflowed; our verdict replaces the check of the flat buffer."""
        verdict = self.gradients.verdict() if partition_gradients else None
        if verdict is None:
            return bool(super().has_overflow(partition_gradients))
        with self.upstream.flat_gradients_as(verdict):
            return bool(super().has_overflow(partition_gradients))

    def _apply_muon_updates_cpu_offload(self) -> None:
        self.steps.update_matrices(super()._apply_muon_updates_cpu_offload)

    def _prepare_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        original = partial(super()._prepare_sub_group, sub_group_id, timer_names)
        self.steps.prepare(sub_group_id, original)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        """Unscale and clip the gradients of a sub-group."""
        original = partial(super().unscale_and_clip_grads, sub_group_id, total_norm)
        self.steps.unscale(sub_group_id, total_norm, original)

    def _optimizer_step(self, sub_group_id: int) -> None:
        original = partial(super()._optimizer_step, sub_group_id)
        self.steps.step_sub_group(sub_group_id, original)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        original = super()._reassign_or_swap_out_partitioned_parameters
        self.steps.update_parameters(sub_group_id, partial(original, sub_group_id))

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        self.steps.release(partial(super()._release_sub_group, sub_group_id, timer_names))

    def _post_step(self, timer_names: Any) -> None:
        self.upstream.wait_writes()
        self.attachment.note_step()
        self.steps.end(partial(super()._post_step, timer_names))

    # -- single values (safe_get_*, safe_set_*) --------------------------------------------------

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Part:
        original = super()._get_fp32_grad_state_partition
        return self.steps.values.gradient(param, release_swap_buffers, original)

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Part:
        original = super()._get_fp32_opt_state_partition
        return self.steps.values.state(param, release_swap_buffers, optim_state_key, original)

    def _writeback_swap_state(self, *arguments: Any, **keywords: Any) -> None:
        self.steps.values.put_back(partial(super()._writeback_swap_state, *arguments, **keywords))

    def _optimizer_states_and_gradient_swap_out(self, *arguments: Any, **keywords: Any) -> None:
        original = super()._optimizer_states_and_gradient_swap_out
        self.steps.values.put_back(partial(original, *arguments, **keywords))

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: list[Any]
    ) -> None:
        """Replace the gradient of each parameter by a function of it."""
        original = super().update_fp32_grad_for_param_vectorized
        self.steps.values.update_gradients(update_func, param_list, original)

    def get_fp32_grad_partitions(self) -> Any:
        """Return all gradients of this rank, unless they are on the drive.

        Raises:
            ConfigError: They are.
        """
        if self.upstream.states_on_drive:
            raise refusal_of_call("get_fp32_grad_partitions")
        return super().get_fp32_grad_partitions()

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        """Set this rank's part of a gradient."""
        set_local_gradient(self.upstream, value, param)

    def set_local_hp_param(
        self, value: torch.Tensor, param: Any, optim_state_key: str | None = None
    ) -> None:
        """Set this rank's part of a state, or of the master weights."""
        set_local_state(self.upstream, value, param, optim_state_key)

    # -- checkpoints -----------------------------------------------------------------------------

    def _rigid_state_dict(self) -> Any:
        self.steps.finish()
        return super()._rigid_state_dict()

    def _restore_from_bit16_weights(self) -> None:
        self.checkpoint.load_weights(super()._restore_from_bit16_weights)

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        original = super()._rigid_load_state_dict
        self.checkpoint.load_states(state_dict, load_optimizer_states, original)
        self.upstream.wait_writes()
        self.steps.mend()

    def reset_swap_buffers(self) -> None:
        """Write the values of the master weights to the parameters."""
        self._partition_all_parameters()
        self.steps.refresh(super().reset_swap_buffers)
        self.upstream.wait_writes()
        self.steps.mend()

    # -- the end ---------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Destroy as DeepSpeed, and free the large host buffers, which DeepSpeed never frees.

        Parameters stay readable: they belong to the model.

        Raises:
            StoreError: The last step failed in the background; everything is freed nevertheless.
        """
        try:
            self.steps.finish()
        finally:
            self._destroy()

    def _destroy(self) -> None:
        super().destroy()
        self.attachment.finish()
        runtime = self.attachment.runtime
        runtime.on_device.close()
        runtime.background.close()
        swapper = self.upstream.state_swapper
        self.upstream.drop_buffers()
        if swapper is not None:
            self.steps.discard(swapper)
        del swapper  # refers to the tiles; the arena returns their memory below
        runtime.close_optimizer()


def _do_nothing() -> None:
    """Stand for a hook that an older DeepSpeed lacks."""
