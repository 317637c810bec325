"""DeepSpeed's ZeRO-3 optimizer with its host buffers, its swapper and its overflow check replaced.

Overrides small hook methods only; the step loop is upstream's. What happens to gradients and to
sub-groups is in the two base classes; here they are wired. An instance exists only for a config
with an active block: without one, constructing this class gives a stock optimizer.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from memascend.base.units import format_nbytes
from memascend.config.block import MemAscendConfig, active_config
from memascend.config.deepspeed_json import section
from memascend.deepspeed.attach.attach import attach
from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.optimizer import restore as optimizer_checkpoint
from memascend.deepspeed.optimizer.checkpoints import CheckpointedOptimizer
from memascend.deepspeed.optimizer.choice import streams_in_use
from memascend.deepspeed.optimizer.gradients import StreamedGradients
from memascend.deepspeed.optimizer.steps import StreamedOptimizer
from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from memascend.deepspeed.parameters.build import parameter_budget
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.deepspeed.plan.live import plan_for
from memascend.deepspeed.plan.optimizers import is_elementwise, state_count
from memascend.deepspeed.stock.host_buffers import AbsentBuffers
from memascend.deepspeed.stock.optimizer_swapper import (
    PipelinedSwapper,
    SequentialSwapper,
    buffers_needed,
)
from memascend.errors import ConfigError
from memascend.runtime import streams_parameters
from memascend.streaming.gradients import GradientSpool
from memascend.streaming.optimizer import OptimizerStream
from memascend.streaming.tiles import TILE_COUNT, TILE_NUMEL_QUANTUM, Tiles, TileShape

log = logging.getLogger(__name__)

#: Bytes of fp32 weights in a tile unless the config says otherwise.
TILE_BYTES = 32 << 20


class ZeroOptimizer(StreamedGradients, StreamedOptimizer, CheckpointedOptimizer):
    """Stands where DeepSpeed looks up DeepSpeedZeroOptimizer_Stage3."""

    _config: MemAscendConfig
    # Upstream's attributes that are assigned to below.
    offload_optimizer_fast_init: bool
    offload_optimizer_pin_memory: bool
    max_params_in_cpu: int
    optimizer_swapper: Any
    grad_partitions_flat_buffer: torch.Tensor | None
    param_groups_fp16_flat_cpu_memory: list[torch.Tensor]
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, torch.Tensor]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        """Gives a stock optimizer when the config holds no active block."""
        ds_config = keywords.get("ds_config", arguments[4] if len(arguments) > 4 else None)
        config = active_config(ds_config)
        if cls is ZeroOptimizer and config is None:
            return DeepSpeedZeroOptimizer_Stage3(*arguments, **keywords)
        made = super().__new__(cls)
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
        self._ds_config = ds_config
        self._offload_optimizer_config = keywords.get("offload_optimizer_config")
        self._attachment: Attachment | None = None
        self._planned_module = module
        _refuse_several_contexts(module)
        _refuse_nothing_to_train(module, init_optimizer)
        super().__init__(module, init_optimizer, param_names, timers, ds_config, **keywords)

    # -- wiring ----------------------------------------------------------------------------------

    @property
    def attachment(self) -> Attachment:
        """What this optimizer works with; the parameters' when they are on the drive too."""
        if self._attachment is None:
            first = next((param for group in self.fp16_groups for param in group), None)
            swapper = getattr(first, "nvme_swapper", None)
            self._attachment = getattr(swapper, "memascend_attachment", None)
            if self._attachment is None:
                offload = self._offload_optimizer_config
                self._attachment = attach(
                    self._config, self._ds_config, getattr(offload, "nvme_path", None)
                )
        return self._attachment

    @property
    def _param_swapper(self) -> ParameterSwapper | None:
        """Ours, or None when parameters are not on the drive or the stock swapper serves."""
        first = next((param for group in self.fp16_groups for param in group), None)
        return None if first is None else swapper_of(first)

    def _host_buffers(self, component: str | None) -> AbstractContextManager[None]:
        return self.attachment.host_buffers(component)

    # -- construction ----------------------------------------------------------------------------

    def _configure_offloading(
        self, offload_optimizer_config: Any, offload_param_config: Any
    ) -> None:
        super()._configure_offloading(offload_optimizer_config, offload_param_config)
        self._decide_parameters_in_cpu()
        if self.offload_optimizer_fast_init:
            # Stock's shortcut needs a parameter buffer as large as a whole sub-group.
            self.offload_optimizer_fast_init = False
            _warn_ignored(
                "offload_optimizer.fast_init", "no sub-group is loaded whole at the start"
            )

    def _decide_parameters_in_cpu(self) -> None:
        """Keeps parameters in host memory only where the user says how many, and no limit binds.

        DeepSpeed's default, 10^9 elements, would hold a whole small model.
        """
        config = self._config
        if not self.params_in_nvme_and_cpu or not streams_parameters(config):
            return
        offload = section(section(self._ds_config, "zero_optimization"), "offload_param")
        is_stated = "max_in_cpu" in offload
        if not is_stated or config.host_memory_limit is not None:
            if is_stated and self.max_params_in_cpu > 0:
                limit = f"memascend.host_memory_limit={config.host_memory_limit!r}"
                _warn_ignored("offload_param.max_in_cpu", f"{limit} decides what stays in memory")
            self.max_params_in_cpu = 0

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        streams = streams_in_use(self.attachment.runtime.config, self)
        if streams.gradients and streams.optimizer:
            self._adopt_plan()
        spool = None
        if streams.gradients or streams.optimizer:
            runtime = self.attachment.runtime
            spool = GradientSpool(
                store=runtime.ranges,
                slots=runtime.staging,
                sum_of_squares=self._squares if streams.gradients else None,
                prefer=runtime.store.prefer if runtime.store is not None else None,
            )
        if streams.gradients:
            self._spool = spool
        if streams.optimizer and spool is not None:
            self._configure_streaming(spool, streams.gradients)
        else:
            self._configure_whole_sub_groups(offload_optimizer_config, aio_config)

    def _adopt_plan(self) -> None:
        """Takes the parameters' and staging memory that the plan says, and prints the plan."""
        attachment = self.attachment
        runtime = attachment.runtime
        plan = plan_for(
            self, self._planned_module, self._config, self._ds_config, runtime.limit_bytes
        )
        swapper = self._param_swapper
        if swapper is not None:
            swapper.drop_unused()
            swapper.synchronize_writes()
        runtime.adopt(plan)
        if swapper is not None and runtime.parameter_slots is not None:
            swapper.adopt_budget(parameter_budget(runtime))
        attachment.log_plan()

    def _configure_streaming(self, spool: GradientSpool, gradients_as_they_arrive: bool) -> None:
        runtime = self.attachment.runtime
        master_dtype = self.master_weights_and_grads_dtype
        largest_numel = max(self.fp16_partitioned_groups_flat_numel)
        tile_bytes = runtime.config.streaming.optimizer.tile_bytes or TILE_BYTES
        numel, count = tile_bytes // master_dtype.itemsize, TILE_COUNT
        if runtime.plan is not None:
            numel, count = runtime.plan.tile_numel, runtime.plan.tile_count
        elif not is_elementwise(self.optimizer):
            numel, count = largest_numel, 1
        shape = TileShape(
            numel=-(-min(numel, largest_numel) // TILE_NUMEL_QUANTUM) * TILE_NUMEL_QUANTUM,
            count=count,
            state_count=state_count(self.optimizer),
            master_dtype=master_dtype,
            gradient_dtype=(
                self.gradient_accumulation_dtype if gradients_as_they_arrive else master_dtype
            ),
            parameter_dtype=self.dtype,
        )
        tiles = Tiles(store=runtime.ranges, memory=runtime.memory, shape=shape)
        if count == 1 and dist.get_rank() == 0:
            log.warning(
                "memascend: %s is not known to work element by element, so a sub-group is stepped "
                "whole; that takes %s of host memory. A smaller sub_group_size lowers it",
                type(self.optimizer).__name__,
                format_nbytes(tiles.nbytes),
            )
        self._stream = OptimizerStream(
            store=runtime.ranges, tiles=tiles, slots=runtime.staging, spool=spool
        )
        self.optimizer_swapper = StreamedSwapper(stream=self._stream, spool=spool)

    def _configure_whole_sub_groups(self, offload_optimizer_config: Any, aio_config: Any) -> None:
        """DeepSpeed's own swapper, over our store and memory."""
        pipelined = offload_optimizer_config.pipeline
        needed = buffers_needed(self.optimizer, pipelined=pipelined)
        if offload_optimizer_config.buffer_count < needed:
            offload_optimizer_config = offload_optimizer_config.model_copy(
                update={"buffer_count": needed}
            )
            # model_copy skips the validator that derives it.
            offload_optimizer_config.__dict__["pipeline"] = pipelined
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

    def _create_param_groups_fp16_flat_cpu_memory(self) -> None:
        # Without any, upstream makes a stand-in of one element.
        has_any = not self.params_in_nvme_and_cpu or self.max_params_in_cpu > 0
        with self._host_buffers("parameters in cpu" if has_any else None):
            super()._create_param_groups_fp16_flat_cpu_memory()

    def _setup_for_real_optimizer(self) -> None:
        if self._spool is None:
            with self._host_buffers("gradients"):
                super()._setup_for_real_optimizer()
        else:
            self._setup_without_gradient_buffer()
        if self._stream is not None:
            self._stream.drain()
        self._finish_writes()

    def _setup_without_gradient_buffer(self) -> None:
        """Upstream's set-up, in which the flat buffer and its pinned copy take no memory."""
        pin_memory = self.offload_optimizer_pin_memory
        numel = sum(p.partition_numel() for group in self.fp16_groups for p in group)
        with AbsentBuffers(torch.zeros, {numel}):
            self.offload_optimizer_pin_memory = pin_memory and self._stream is None
            super()._setup_for_real_optimizer()
        self.offload_optimizer_pin_memory = pin_memory
        self.grad_partitions_flat_buffer = None
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}

    def _create_fp32_partitions(self) -> None:
        # Temporaries, or master weights that stock leaves pageable too: not for the arena, whose
        # memory would stay taken after them.
        if self._stream is None:
            with self._host_buffers(None):
                super()._create_fp32_partitions()
        else:
            # Upstream makes room for a whole sub-group, which is then streamed past it.
            with AbsentBuffers(torch.empty, set(self.fp16_partitioned_groups_flat_numel)):
                super()._create_fp32_partitions()

    def initialize_optimizer_states(self) -> None:
        """As upstream; gradients that stay in host memory are in the arena."""
        with self._host_buffers(None if self.swap_optimizer else "gradients"):
            super().initialize_optimizer_states()

    # -- a step ----------------------------------------------------------------------------------

    def _partition_all_parameters(self) -> None:
        """As upstream; shards that were read ahead and not used are let go with the others.

        Whatever changes parameters (a step, a load) comes after this, and would otherwise change
        only their host copy.
        """
        super()._partition_all_parameters()
        swapper = self._param_swapper
        if swapper is not None:
            swapper.drop_unused()

    def _post_step(self, timer_names: Any) -> None:
        self._finish_writes()
        self.attachment.note_step()
        super()._post_step(timer_names)

    def _finish_writes(self) -> None:
        swapper = self._param_swapper
        if swapper is not None:
            swapper.synchronize_writes()

    # -- checkpoints -----------------------------------------------------------------------------

    def _rigid_load_state_dict(self, state_dict: Any, load_optimizer_states: bool = True) -> None:
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        self._finish_writes()
        self.wholeness.mend()

    def reset_swap_buffers(self) -> None:
        """Gives the parameters the values of the master weights."""
        self._partition_all_parameters()
        super().reset_swap_buffers()
        self._finish_writes()

    def destroy(self) -> None:
        """As upstream, and gives the large host buffers back: DeepSpeed itself never lets them go.

        Parameters stay readable; they are the model's, not the optimizer's.
        """
        super().destroy()
        self.attachment.finish()
        self.grad_partitions_flat_buffer = None
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}
        self.param_groups_fp16_flat_cpu_memory = []
        for partition in self.fp32_partitioned_groups_flat:
            partition.grad = None
        swapper: Any = self.optimizer_swapper
        self.optimizer_swapper = None
        store = self.attachment.runtime.store
        if self._stream is not None:
            self._stream.discard()
        elif swapper is not None and store is not None:
            swapper.swap_buffer_manager.all_buffers = []
            for key in optimizer_checkpoint.all_keys(swapper):
                store.discard(key=key)
        if swapper is not None and isinstance(swapper, StreamedSwapper):
            swapper.spool.discard()
        elif self._spool is not None:
            self._spool.discard()
        self._stream = self._spool = None
        if store is not None:
            store.trim()
        if self.attachment.runtime.arena is not None:
            self.attachment.runtime.arena.core.trim()


def _warn_ignored(key: str, reason: str) -> None:
    """Says once that a stated key has no effect, also where INFO is not shown yet or at all."""
    if dist.get_rank() == 0:
        log.warning("memascend: zero_optimization.%s is ignored: %s", key, reason)


def _refuse_several_contexts(module: torch.nn.Module) -> None:
    """DeepSpeed gives mixed lists of parameters to the swapper of the first one."""
    swappers = {id(swapper_of(param)) for param in module.parameters() if swapper_of(param)}
    if len(swappers) > 1:
        raise ConfigError(
            f"the parameters of this model come from {len(swappers)} deepspeed.zero.Init contexts, "
            "and DeepSpeed cannot swap parameters of several contexts together. Build the whole "
            "model in one, or outside of any and let deepspeed.initialize partition it"
        )


def _refuse_nothing_to_train(module: torch.nn.Module, optimizer: Any) -> None:
    """DeepSpeed takes the largest of all sub-groups, and fails obscurely where there are none."""
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.requires_grad for param in given):
        return
    of_model = [param.requires_grad for param in module.parameters()]
    raise ConfigError(
        f"there is nothing to train: of the {len(given)} tensors given to "
        f"{type(optimizer).__name__} none requires a gradient, of the model's {len(of_model)} "
        f"tensors {sum(of_model)} do. likely cause: all weights are frozen, or adapters were added "
        "after the optimizer was made. fix: requires_grad_(True) on what is to be trained, before "
        "deepspeed.initialize, and give it those parameters; to run without training, leave the "
        "optimizer out"
    )
