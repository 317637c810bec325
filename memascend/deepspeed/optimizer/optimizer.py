"""DeepSpeed's ZeRO-3 optimizer with its host buffers, its swapper and its overflow check replaced.

Only small hook methods are overridden; the step loop is upstream's. There are four kinds: gradients
in the gradient stream or in the flat buffer, times steps in tiles or of whole sub-groups.
Constructing ZeroOptimizer gives the kind that the config selects; without an active block, a stock
optimizer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import get_norm_dtype

from memascend.config.block import MemAscendConfig, active_config
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.attach import attach
from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.optimizer.behind import LOADED
from memascend.deepspeed.optimizer.checkpoints import CheckpointedOptimizer
from memascend.deepspeed.optimizer.choice import choose_streams
from memascend.deepspeed.optimizer.gradients import FlatGradients, StreamedGradients
from memascend.deepspeed.optimizer.passes import BackwardPasses
from memascend.deepspeed.optimizer.steps import WholeSteps
from memascend.deepspeed.optimizer.stored_dtype import store_as
from memascend.deepspeed.optimizer.tiled_steps import TiledSteps
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.deepspeed.plan.from_optimizer import plan_for
from memascend.errors import ConfigError, IncompleteGradientError
from memascend.kernels.overflow import sum_of_squares
from memascend.plan.advice import advise, advise_in_cpu, advise_pinning
from memascend.plan.derive import Plan
from memascend.plan.shapes import from_module
from memascend.runtime import streams_parameters
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.optimizer.sub_groups import StepIntegrity

log = logging.getLogger(__name__)

#: Parameter dtypes that can be trained, besides a model that is all fp64.
_TRAINED_DTYPES = {torch.float32, torch.bfloat16, torch.float16}


class ZeroOptimizer(CheckpointedOptimizer):
    """Replaces DeepSpeedZeroOptimizer_Stage3."""

    _config: MemAscendConfig
    # Upstream's attributes that this class assigns.
    offload_optimizer_fast_init: bool
    max_params_in_cpu: int
    optimizer_swapper: Any
    grad_partitions_flat_buffer: torch.Tensor | None
    micro_step_id: int
    _backward_active_depth: int
    _epilogue_ran_this_backward: bool
    param_groups_fp16_flat_cpu_memory: list[torch.Tensor]
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, torch.Tensor]

    streams_gradients: bool
    streams_optimizer: bool
    #: A GradientStream; None if neither gradients nor the optimizer are streamed.
    gradient_stream: Any = None

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Return the kind that the config selects; without an active block, a stock optimizer."""
        if cls is not ZeroOptimizer:  # copy.copy calls this for a kind, without arguments
            return super().__new__(cls)
        names = ("module", "init_optimizer", "param_names", "timers", "ds_config")
        given = dict(zip(names, arguments, strict=False)) | keywords
        config = active_config(given.get("ds_config"))
        if config is None:
            return DeepSpeedZeroOptimizer_Stage3(*arguments, **keywords)
        made = super().__new__(_choose_kind(config, given))
        made._config = config
        return made

    def __init__(
        self,
        module: torch.nn.Module,
        init_optimizer: Any,
        param_names: Any,
        timers: Any,
        ds_config: Any,
        **keywords: Any,
    ) -> None:
        self.settings = parse_deepspeed(ds_config)
        self._attachment: Attachment | None = None
        self.integrity = StepIntegrity()
        self.passes = BackwardPasses()
        _refuse_several_contexts(module)
        _refuse_nothing_to_train(module, init_optimizer)
        _refuse_dtypes(init_optimizer)
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **keywords)

    # -- wiring ----------------------------------------------------------------------------------

    @property
    def attachment(self) -> Attachment:
        """The model's attachment: the parameters' if they are on the drive, else a new one."""
        if self._attachment is None:
            first = next((param for group in self.fp16_groups for param in group), None)
            swapper = getattr(first, "nvme_swapper", None)
            self._attachment = getattr(swapper, "memascend_attachment", None)
            if self._attachment is not None:
                self._attachment.begin()
            else:
                nvme_path = self.settings.zero_optimization.offload_optimizer.nvme_path
                self._attachment = attach(self._config, self.settings, nvme_path)
        return self._attachment

    @property
    def _param_swapper(self) -> ParameterSwapper | None:
        """Our parameter swapper; None without offloaded parameters or with the stock swapper."""
        first = next((param for group in self.fp16_groups for param in group), None)
        return None if first is None else swapper_of(first)

    # -- construction ----------------------------------------------------------------------------

    def _configure_offloading(
        self, offload_optimizer_config: Any, offload_param_config: Any
    ) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        self._decide_parameters_in_cpu()
        if self.offload_optimizer_fast_init:
            # Stock's shortcut needs a parameter buffer as large as a whole sub-group.
            self.offload_optimizer_fast_init = False
            reason = "no sub-group is loaded whole at the start"
            _warn_ignored("offload_optimizer.fast_init", reason)

    def _decide_parameters_in_cpu(self) -> None:
        """Keep parameters in host memory only if `max_in_cpu` is stated and there is no limit.

        DeepSpeed's default, 10^9 elements, would hold a whole small model.
        """
        config = self._config
        if not self.params_in_nvme_and_cpu or not streams_parameters(config):
            return
        is_stated = "max_in_cpu" in self.settings.zero_optimization.offload_param.stated
        if not is_stated or config.host_memory_limit is not None:
            if is_stated and self.max_params_in_cpu > 0:
                limit = f"memascend.host_memory_limit={config.host_memory_limit!r}"
                _warn_ignored("offload_param.max_in_cpu", f"{limit} sets how much stays in memory")
            self.max_params_in_cpu = 0

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        if self.streams_gradients and self.streams_optimizer:
            self._adopt_plan()
        if self.streams_gradients or self.streams_optimizer:
            runtime = self.attachment.runtime
            assert runtime.store is not None
            check = runtime.config.overflow_check
            squares = functools.partial(
                sum_of_squares,
                fused=check.enabled,
                helpers=runtime.helpers,
                dtype=get_norm_dtype(),
            )
            self.gradient_stream = GradientStream(
                store=runtime.io,
                slots=runtime.staging,
                sum_of_squares=squares if self.streams_gradients else None,
                give_memory_to=runtime.store.give_memory_to,
                memory_of=runtime.store.memory_of,
            )
        super()._configure_tensor_swapping(offload_optimizer_config, aio_config)

    def _adopt_plan(self) -> None:
        """Derive the plan, resize slots and staging memory to it, and log its advice."""
        limit_bytes = self.attachment.runtime.limit_bytes
        plan = plan_for(self, self.module, self._config, self.settings, limit_bytes)
        self._drop_unused()
        self._finish_writes()
        self.attachment.adopt(plan)
        if dist.get_rank() == 0:
            for line in self._advice(plan):
                log.info("memascend: %s", line)

    def _advice(self, plan: Plan) -> list[str]:
        shapes, runtime = from_module(self.module), self.attachment.runtime
        page_locks = self._config.allocator.enabled and self._config.allocator.page_lock is None
        on_cpu = runtime.new_event is None
        found = (
            advise(shapes, plan),
            advise_in_cpu(shapes, plan),
            advise_pinning(shapes, plan, self.settings, locks_for_nothing=page_locks and on_cpu),
        )
        return [line for line in found if line]

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        if self.params_in_nvme_and_cpu:
            store_as(
                [param for group in self.fp16_groups for param in group],
                self.dtype,
                attachment=self.attachment,
                pin_memory=self.offload_param_pin_memory,
            )
        # If no parameter stays in memory upstream allocates a dummy of one element.
        has_any = not self.params_in_nvme_and_cpu or self.max_params_in_cpu > 0
        with self.attachment.host_buffers("parameters in cpu" if has_any else None):
            super()._create_param_groups_fp16_flat_cpu_memory()

    def _setup_for_real_optimizer(self) -> None:
        super()._setup_for_real_optimizer()
        self._finish_writes()

    # -- backward --------------------------------------------------------------------------------

    def clear_backward_seen_flag(self) -> None:
        """Begin a forward pass; drop the gradients of a backward pass that an error aborted.

        Upstream would add the next gradients to those not reduced, or find a parameter twice in a
        bucket. Gradients that were reduced are overwritten by the next pass, unless it accumulates:
        after an error in a later micro-step the script must call `zero_grad`.

        Inside a running backward pass the gradients in the buckets are reduced instead, so that the
        inner pass finds the buckets empty.
        """
        if self.passes.continues():
            self._keep_gradients()
        self._drop_unreduced()
        super().clear_backward_seen_flag()

    def drop_left(self) -> None:
        """Drop the gradients of a backward pass that an error aborted, if there is one."""
        if self.passes.was_left():
            self._drop_gradients()

    def _drop_unreduced(self) -> None:
        """Drop the gradients of an aborted pass, also if it failed in the final reduction.

        Upstream's depth is then above 0 while no pass runs.
        """
        is_open = self._backward_active_depth > 0 and not self.passes.is_under_way()
        if is_open or self.passes.was_left():
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for bucket in self.ipg_buckets.values():
            bucket.clear_params()
        for param in (param for group in self.fp16_groups for param in group):
            param.grad = None
        self._backward_active_depth = 0  # else upstream skips the reduction after the next pass
        self._end_step()  # gradients of the next pass may arrive in another order
        self.passes.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Restart the window of micro-steps as upstream, also after an aborted pass."""
        self._drop_unreduced()
        super().zero_grad(set_to_none)

    def enter_backward(self) -> None:
        """Begin a backward pass as upstream, once per graph.

        Upstream counts a graph with two outputs twice, and would not reduce at its end.
        """
        if self.passes.enter() or self._backward_active_depth == 0:
            super().enter_backward()

    def independent_gradient_partition_epilogue(self) -> None:
        """Reduce as upstream at the end of a pass; nested passes are one micro-step.

        Raises:
            IncompleteGradientError: A pass inside this one failed, and the script continued.
        """
        with self.passes.ending():
            if self.passes.is_inner:
                self._keep_gradients()
                return
            super().independent_gradient_partition_epilogue()
        # The graphs of inner passes were counted too; only this one still runs.
        self._backward_active_depth = min(self._backward_active_depth, 1)

    def _keep_gradients(self) -> None:
        """Reduce the buckets; later passes of the same micro-step add to these gradients."""
        super().independent_gradient_partition_epilogue()
        self._epilogue_ran_this_backward = False  # the micro-step is not over
        self.passes.keep()

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Any]) -> Any:
        """Store the gradients of a bucket; add those of parameters reduced by an earlier pass."""
        adding = [self.passes.adds(param.ds_id) for param in params_to_release]
        taken = []
        for adds in sorted(set(adding)):
            chosen = [number for number, one in enumerate(adding) if one == adds]
            micro_step_id = self.micro_step_id
            self.micro_step_id = max(micro_step_id, int(adds))
            try:
                taken += super().partition_grads(
                    [params_to_release[number] for number in chosen],
                    [grad_partitions[number] for number in chosen],
                )
            finally:
                self.micro_step_id = micro_step_id
        self.passes.note_reduced(param.ds_id for param in params_to_release)
        return taken

    # -- a step ----------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """Step as upstream.

        Raises:
            IncompleteGradientError: The last backward pass failed, or was not reduced.
        """
        self.passes.check()
        if any(bucket.params for bucket in self.ipg_buckets.values()):
            raise IncompleteGradientError  # upstream would drop them and use older ones
        super().step(closure)

    def _partition_all_parameters(self) -> None:
        """Partition as upstream, and release shards that were read ahead and not used.

        A step or a load follows and changes the parameters on the drive; a shard read before would
        be stale.
        """
        super()._partition_all_parameters()
        self._drop_unused()

    def _post_step(self, timer_names: Any) -> None:
        self._finish_writes()
        self.attachment.note_step()
        super()._post_step(timer_names)

    def _drop_unused(self) -> None:
        swapper = self._param_swapper
        if swapper is not None:
            swapper.drop_unused()

    def _finish_writes(self) -> None:
        swapper = self._param_swapper
        if swapper is not None:
            swapper.synchronize_writes()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any rank overflowed; our verdict replaces the check of the flat buffer."""
        verdict = self._verdict() if partition_gradients else None
        if verdict is None:
            return bool(super().has_overflow(partition_gradients))
        gradients = self.grad_partitions_flat_buffer
        self.grad_partitions_flat_buffer = verdict
        try:
            return bool(super().has_overflow(partition_gradients))
        finally:
            self.grad_partitions_flat_buffer = gradients

    # -- checkpoints -----------------------------------------------------------------------------

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        self.finish_walk()
        self.forget_early(LOADED)
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        self._finish_writes()
        self.integrity.mend()

    def reset_swap_buffers(self) -> None:
        """Write the values of the master weights to the parameters."""
        self._partition_all_parameters()
        super().reset_swap_buffers()
        self._finish_writes()
        self.integrity.mend()

    def destroy(self) -> None:
        """Destroy as upstream, and free the large host buffers, which DeepSpeed never frees.

        Parameters stay readable: they belong to the model.

        Raises:
            StoreError: The last step failed in the background; everything is freed nevertheless.
        """
        try:
            self.finish_walk()
        finally:
            self._destroy()

    def _destroy(self) -> None:
        super().destroy()
        self.attachment.finish()
        self.attachment.runtime.background.close()
        self.grad_partitions_flat_buffer = None
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}
        self.param_groups_fp16_flat_cpu_memory = []
        for partition in self.fp32_partitioned_groups_flat:
            partition.grad = None
        swapper, self.optimizer_swapper = self.optimizer_swapper, None
        gradient_stream, self.gradient_stream = self.gradient_stream, None
        if swapper is not None:
            self._discard(swapper)
        if gradient_stream is not None:
            with self.attachment.runtime.lock:
                gradient_stream.discard()
        del swapper, gradient_stream  # frees the tiles; the arena returns their memory below
        runtime = self.attachment.runtime
        if runtime.store is not None:
            runtime.store.trim()
        if runtime.arena is not None:
            runtime.arena.core.trim()


class StreamedTiledOptimizer(ZeroOptimizer, StreamedGradients, TiledSteps):
    """Gradients in the gradient stream, steps in tiles: the default of a block."""


class StreamedWholeOptimizer(ZeroOptimizer, StreamedGradients, WholeSteps):
    """Gradients in the gradient stream; sub-groups are stepped whole."""


class FlatTiledOptimizer(ZeroOptimizer, FlatGradients, TiledSteps):
    """Gradients in DeepSpeed's flat buffer, steps in tiles."""


class FlatWholeOptimizer(ZeroOptimizer, FlatGradients, WholeSteps):
    """Both as in DeepSpeed, in our store and memory; also for an optimizer in memory."""


def _choose_kind(config: MemAscendConfig, arguments: Mapping[str, Any]) -> type[ZeroOptimizer]:
    streams_gradients, streams_optimizer = choose_streams(config, arguments)
    if streams_gradients:
        return StreamedTiledOptimizer if streams_optimizer else StreamedWholeOptimizer
    return FlatTiledOptimizer if streams_optimizer else FlatWholeOptimizer


def _warn_ignored(key: str, reason: str) -> None:
    """Warn on rank 0 that a stated key has no effect. A warning, since INFO may not be shown."""
    if dist.get_rank() == 0:
        log.warning("memascend: zero_optimization.%s is ignored: %s", key, reason)


def _refuse_several_contexts(module: torch.nn.Module) -> None:
    """Refuse parameters with several swappers: DeepSpeed passes any list of them to one."""
    swappers = {id(swapper_of(param)) for param in module.parameters() if swapper_of(param)}
    if len(swappers) > 1:
        raise ConfigError(
            f"the parameters of this model come from {len(swappers)} deepspeed.zero.Init contexts, "
            "and DeepSpeed cannot swap parameters of several contexts together. Build the whole "
            "model in one, or outside of any and let deepspeed.initialize partition it"
        )


def _refuse_nothing_to_train(module: torch.nn.Module, optimizer: Any) -> None:
    """Refuse a model without sub-groups: DeepSpeed would fail to find the largest one."""
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.requires_grad for param in given):
        return
    of_model = [param.requires_grad for param in module.parameters()]
    raise ConfigError(
        f"there is nothing to train: none of the {len(given)} tensors given to "
        f"{type(optimizer).__name__} requires a gradient; of the model's {len(of_model)} tensors "
        f"{sum(of_model)} do. likely cause: all weights are frozen, or adapters were added after "
        "the optimizer was made. fix: requires_grad_(True) on the parameters to train, before "
        "deepspeed.initialize, and give it those parameters; to run without training, leave the "
        "optimizer out"
    )


def _refuse_dtypes(optimizer: Any) -> None:
    """Refuse dtypes that cannot be trained, also that of a frozen first parameter.

    DeepSpeed takes the dtype of all weights from the first parameter that it is given. A model that
    is entirely in fp64 is allowed.
    """
    given = [param for group in optimizer.param_groups for param in group["params"]]
    first = given[0].dtype
    trained = {param.dtype for param in given if param.requires_grad}
    if {first} | trained <= _TRAINED_DTYPES or {first} | trained == {torch.float64}:
        return
    raise ConfigError(
        f"{type(optimizer).__name__} cannot train its parameters: the first parameter is "
        f"{first}, those that require a gradient are {', '.join(sorted(map(str, trained)))}. "
        "DeepSpeed keeps all weights in the dtype of the first, and they are trained in fp32, bf16 "
        "or fp16. likely cause: frozen parameters that are no floats, such as packed 4-bit "
        "weights, were given to the optimizer. fix: model_parameters=[p for p in "
        "model.parameters() if p.requires_grad] in deepspeed.initialize; convert trained ones of "
        "another dtype to fp32 before"
    )
