"""The table of seams: the definitions replaced in DeepSpeed, with reason and replacement.

Each row has the fingerprint of the upstream definition it was written for (see fingerprint.py), and
so has each definition that our code overrides or relies on (`WATCHED`). Fingerprints, not version
numbers, decide whether a release is supported. Replacements are named here and imported when they
are armed, so that watching for a block costs nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

_ZERO = "deepspeed.runtime.zero"
_SWAP = "deepspeed.runtime.swap_tensor"
_ENGINE = "deepspeed.runtime.engine"
_OURS = "memascend.deepspeed"


@dataclass(frozen=True)
class Seam:
    """One place where DeepSpeed is altered.

    Attributes:
        name: Name of the seam in messages.
        module: The upstream module.
        attribute: The definition in it, dotted.
        reason: Why it is replaced.
        replacement: Our replacement as "module:name".
        is_wrapper: The replacement is a function that takes the upstream definition and returns
            the new one; otherwise it is the new one itself.
        older: The definition that is replaced where upstream does not have `attribute`; without
            it a wrapper has nothing to wrap there, and is left out.
    """

    name: str
    module: str
    attribute: str
    reason: str
    replacement: str
    is_wrapper: bool = True
    older: str = ""

    def replace(self, original: Any) -> Any:
        """Return the new definition."""
        replacement = import_name(self.replacement)
        return replacement(original) if self.is_wrapper else replacement


def import_name(path: str) -> Any:
    """Import and return a definition given as "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


SEAMS: tuple[Seam, ...] = (
    Seam(
        "parameter swapper",
        f"{_ZERO}.partition_parameters",
        "AsyncPartitionedParameterSwapper",
        "zero.Init looks the class up here; ours stages in size classes and releases slots early",
        f"{_OURS}.parameters.build:wrap_param_swapper",
    ),
    Seam(
        "gather",
        f"{_ZERO}.partition_parameters",
        "Init._convert_to_deepspeed_param",
        "gives the coordinator gathers that begin when their parameters are needed",
        f"{_OURS}.parameters.gather:wrap_convert",
    ),
    Seam(
        "gather of a list",
        f"{_ZERO}.partition_parameters",
        "Init._all_gather",
        "splits lists by the swappers of their parameters, releases slots early, works in turns",
        f"{_OURS}.parameters.gather:wrap_all_gather",
    ),
    Seam(
        "gather of a module",
        f"{_ZERO}.partitioned_param_coordinator",
        "PartitionedParameterCoordinator.__all_gather_params",
        "splits lists by the swappers of their parameters",
        f"{_OURS}.parameters.gather:wrap_coordinated",
    ),
    Seam(
        "parameters in flight",
        f"{_ZERO}.partitioned_param_coordinator",
        "InflightParamRegistry.__setitem__",
        "each parameter of a prefetched list is waited for separately",
        f"{_OURS}.parameters.gather:wrap_register",
    ),
    Seam(
        "fetch",
        f"{_ZERO}.partitioned_param_coordinator",
        "PartitionedParameterCoordinator._fetch_sub_module_impl",
        "gathers begin with the module that needs them, the same on every rank; a trace that lacks "
        "one of its parameters is dropped",
        f"{_OURS}.parameters.gather:wrap_fetch",
        older="PartitionedParameterCoordinator.fetch_sub_module",
    ),
    Seam(
        "releases",
        f"{_ZERO}.partitioned_param_coordinator",
        "PartitionedParameterCoordinator.__params_to_release",
        "DeepSpeed's decisions outlive their trace, in a cache that keeps every module alive",
        f"{_OURS}.parameters.params_to_release:wrap_params_to_release",
    ),
    Seam(
        "access",
        f"{_ZERO}.parameter_offload",
        "ZeROOrderedDict.__getitem__",
        "the use of a prefetched weight outside its module waits for its gather",
        f"{_OURS}.parameters.access:wrap_access",
    ),
    Seam(
        "destroy",
        f"{_ZERO}.parameter_offload",
        "DeepSpeedZeRoOffload.destroy",
        "DeepSpeed keeps every module alive that it has ever run",
        f"{_OURS}.parameters.destroy:wrap_destroy",
    ),
    Seam(
        "partition",
        f"{_ZERO}.partition_parameters",
        "Init._partition_param",
        "a modified parameter gets a slot again; small pinned shards come from the arena",
        f"{_OURS}.parameters.gather:wrap_partition",
    ),
    Seam(
        "optimizer",
        f"{_ZERO}.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "the engine looks the class up here; ours overrides hook methods of the same class",
        f"{_OURS}.optimizer.optimizer:ZeroOptimizer",
        is_wrapper=False,
    ),
    Seam(
        "engine",
        _ENGINE,
        "DeepSpeedEngine.memascend",
        "added: `engine.memascend.ledger()`",
        f"{_OURS}.attach.attachment:ENGINE_PROPERTY",
        is_wrapper=False,
    ),
    Seam(
        "consolidated weights",
        _ENGINE,
        "DeepSpeedEngine._zero3_consolidated_16bit_state_dict",
        "the 16-bit model for saving is a file on the drive instead of host memory on rank 0",
        f"{_OURS}.weights.export:wrap_consolidate",
    ),
    *(
        Seam(
            name.strip("_"),
            _ENGINE,
            f"DeepSpeedEngine.{name}",
            reason,
            f"{_OURS}.checkpoint.engine:wrap_{name.strip('_')}",
        )
        for name, reason in (
            ("save_checkpoint", "a save is atomic, and tensors go straight into it"),
            ("load_checkpoint", "a load verifies first, and takes tensors straight back"),
            ("zero_nvme_offload_optimizer", "false during both: no folder is copied"),
            ("_load_zero_checkpoint", "upstream reads whole files into memory"),
            ("_get_all_ckpt_names", "another number of ranks may have saved"),
        )
    ),
    *(
        Seam(
            name,
            _ENGINE,
            f"DeepSpeedEngine.{attribute}",
            "collectives follow, at which others would wait for a rank that failed",
            f"{_OURS}.checkpoint.engine:{replacement}",
        )
        for name, attribute, replacement in (
            ("save of the module", "_save_checkpoint", "wrap_save_part"),
            ("save of the optimizer", "_save_zero_checkpoint", "wrap_save_part"),
            ("load of the module", "_load_checkpoint", "wrap_load_part"),
        )
    ),
    Seam(
        "forward",
        _ENGINE,
        "DeepSpeedEngine.forward",
        "saved activations go to the drive; its time is measured",
        f"{_OURS}.activations.forward:wrap_forward",
    ),
    Seam(
        "backward",
        _ENGINE,
        "DeepSpeedEngine.backward",
        "tells a call that an error has ended from a running one",
        f"{_OURS}.optimizer.passes:wrap_backward",
    ),
    Seam(
        "step",
        _ENGINE,
        "DeepSpeedEngine.step",
        "its time is measured, for `memascend monitor`",
        f"{_OURS}.monitor.engine:wrap_step",
    ),
    Seam(
        "release of a parameter",
        f"{_ZERO}.partitioned_param_coordinator",
        "PartitionedParameterCoordinator.__release_param",
        "the weights of a layer stay gathered until its last slice",
        f"{_OURS}.slices.held:wrap_release",
    ),
    *(
        Seam(
            name.replace("_", " "),
            f"{_ZERO}.parameter_offload",
            f"DeepSpeedZeRoOffload.{name}",
            "a module is fetched and released once for all slices of its layer",
            f"{_OURS}.slices.held:{wrapper}",
        )
        for name, wrapper in (
            ("pre_sub_module_forward_function", "wrap_before"),
            ("post_sub_module_forward_function", "wrap_after"),
            ("pre_sub_module_backward_function", "wrap_before"),
            ("post_sub_module_backward_function", "wrap_after"),
        )
    ),
    Seam(
        "checkpoint inputs",
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "_get_cpu_offload_engine",
        "`cpu_checkpointing` keeps them on the drive instead of in host memory",
        f"{_OURS}.activations.offload:wrap_offload_engine",
    ),
    *(
        Seam(
            f"aio in {module}",
            f"{_SWAP}.{module}",
            "AsyncIOBuilder",
            "gives DeepSpeed's own swapper a handle over our store",
            f"{_OURS}.stock.aio_handle:wrap_builder",
        )
        for module in (
            "partitioned_param_swapper",
            "partitioned_optimizer_swapper",
            "pipelined_optimizer_swapper",
        )
    ),
)

#: Attributes of an engine, a config and a parameter that our code reads and that no method defines.
#: Each stands for the statements that assign it.
ENGINE_ATTRIBUTES = (
    "_config",
    "checkpoint_engine",
    "checkpoint_mp_rank",
    "engine_timers",
    "global_rank",
    "has_moe_layers",
    "local_rank",
    "lr_scheduler",
    "monitor",
    "mp_world_size",
    "mpu",
    "seq_dp_world_size",
    "timers",
)
CONFIG_ATTRIBUTES = ("_param_dict",)
PARAMETER_ATTRIBUTES = (
    *("ds_id", "ds_numel", "ds_status", "ds_tensor"),
    *("ds_process_group", "ds_zero_partition_rank"),
)

#: Definitions that our code overrides, calls or reads, or whose behaviour it relies on.
WATCHED: tuple[tuple[str, str], ...] = (
    *(
        (f"{_ZERO}.stage3", f"DeepSpeedZeroOptimizer_Stage3.{method}")
        for method in (
            "__init__",
            "_configure_offloading",
            "_configure_tensor_swapping",
            "_create_param_groups_fp16_flat_cpu_memory",
            "_move_to_flat_buffer",
            "_setup_for_real_optimizer",
            "_create_fp32_partitions",
            "_swap_in_sub_group_to_flat_buffer",
            "initialize_optimizer_states",
            "__avg_scatter_contiguous_grads",
            "__avg_scatter_grads",
            "partition_grads",
            "_finalize_offload_gradient_accumulation",
            "_constant_buffered_norm2",
            "complete_grad_norm_calculation_for_cpu_offload",
            "_partitioned_params_swap_out",
            "has_overflow",
            "clear_backward_seen_flag",
            "independent_gradient_partition_epilogue",
            "zero_grad",
            "step",
            "_apply_muon_updates_cpu_offload",
            "_partitioned_buffers_all_gather",
            "_clear_muon_allgather_buffers",
            "_prepare_sub_group",
            "unscale_and_clip_grads",
            "_optimizer_step",
            "_reassign_or_swap_out_partitioned_parameters",
            "_release_sub_group",
            "_partition_all_parameters",
            "_post_step",
            "reset_swap_buffers",
            "_get_fp32_grad_state_partition",
            "_get_fp32_opt_state_partition",
            "_optimizer_states_and_gradient_swap_out",
            "_writeback_swap_state",
            "set_local_grad_for_param",
            "set_local_hp_param",
            "update_fp32_grad_for_param_vectorized",
            "get_fp32_grad_partitions",
            "_restore_from_bit16_weights",
            "_rigid_state_dict",
            "_rigid_load_state_dict",
            "_set_fp32_optimizer_param_groups",
            "_clear_fp32_optimizer_param_groups",
            "_fp32_state_allgather",
            "_get_loss_scale",
            "_get_param_partition_group",
            "_get_param_partition_rank",
            "_get_norm_groups",
            "_overflow_clean_up",
            "_pre_step",
            "create_reduce_and_remove_grad_hooks",
            "reduce_ready_partitions_and_remove_grads",
            "reduce_independent_p_g_buckets_and_remove_grads",
            "__add_grad_to_ipg_bucket",
            "__reduce_and_partition_ipg_grads",
            "_swappable_optimizer_subgroup",
            "_unflatten_partitioned_parameters",
            "get_param_id",
            "loss_scale",
            "destroy",
        )
    ),
    (f"{_ZERO}.stage3", "IPGBucketZ3.clear_params"),
    *(
        (_ENGINE, f"DeepSpeedEngine.{method}")
        for method in (
            "_get_ckpt_name",
            "_get_zero_ckpt_name",
            "_get_rank_zero_ckpt_name",
            "_get_zero_param_shapes",
            "_get_zero_frozen_param_attributes",
            "autotp_size",
            "bfloat16_enabled",
            "is_gradient_accumulation_boundary",
            "load_universal_checkpoint",
            "use_node_local_storage",
            "zero_optimization_partition_weights",
            "_forward_prologue",
            "_forward_epilogue",
            "_backward_prologue",
            "_backward_epilogue",
            "_backward_post_hook",
        )
    ),
    *((_ENGINE, f"DeepSpeedEngine.{attribute}") for attribute in ENGINE_ATTRIBUTES),
    *(("deepspeed.runtime.config", f"DeepSpeedConfig.{name}") for name in CONFIG_ATTRIBUTES),
    *(
        ("deepspeed.runtime.base_optimizer", f"ZeROOptimizer.{name}")
        for name in (
            "enter_backward",
            "get_param_comm_dtype",
            "is_gradient_accumulation_boundary",
            "_backward_seen_this_step",
            "_epilogue_ran_this_backward",
            "_backward_active_depth",
            "_remaining_grad_acc_hooks",
        )
    ),
    ("deepspeed.runtime.base_optimizer", "BackwardHookStateManager"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler.__init__"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler.update_scale"),
    ("deepspeed.runtime.torch_autocast", "is_autocast_initialized"),
    ("deepspeed.checkpoint.constants", "FROZEN_PARAM_FRAGMENTS"),
    ("deepspeed.utils", "z3_leaf_module"),
    (_ENGINE, "EngineTimers.active_timers"),
    ("deepspeed.utils.timer", "SynchronizedWallClockTimer.Timer"),
    (f"{_ZERO}.utils", "get_norm_dtype"),
    (f"{_ZERO}.offload_config", "OffloadDeviceEnum"),
    (f"{_ZERO}.offload_config", "DeepSpeedZeroOffloadOptimizerConfig.set_pipeline"),
    *((f"{_ZERO}.partition_parameters", f"Init.{name}") for name in PARAMETER_ATTRIBUTES),
    (f"{_ZERO}.partition_parameters", "ZeroParamStatus"),
    (f"{_ZERO}.partition_parameters", "NoGatherHandle"),
    (f"{_ZERO}.partition_parameters", "NoGatherCoalescedHandle"),
    (f"{_ZERO}.partition_parameters", "_no_gather_coalesced"),
    (f"{_ZERO}.partition_parameters", "register_external_parameter"),
    (f"{_ZERO}.partition_parameters", "Init._ensure_availability_of_partitioned_params"),
    (f"{_ZERO}.partition_parameters", "Init._partition"),
    (f"{_ZERO}.partition_parameters", "Init._allgather_params_coalesced"),
    (f"{_ZERO}.partition_parameters", "Init._allgather_params_sequential"),
    (f"{_ZERO}.partition_parameters", "Init.param_swapper"),
    (f"{_ZERO}.partitioned_param_coordinator", "iter_params"),
    (f"{_ZERO}.parameter_offload", "FWD_MODULE_STACK"),
    (f"{_ZERO}.parameter_offload", "ZeROOrderedDict._in_forward"),
    (f"{_ZERO}.parameter_offload", "ZeROOrderedDict._parent_module"),
    (f"{_ZERO}.parameter_offload", "DeepSpeedZeRoOffload.setup_zero_stage3_hooks"),
    ("deepspeed.utils.nvtx", "instrument_w_nvtx"),
    *(
        (f"{_ZERO}.partitioned_param_coordinator", f"PartitionedParameterCoordinator.{method}")
        for method in (
            "fetch_sub_module",
            "trace_prologue",
            "is_complete_trace",
            "_invalidate_trace",
            "__step_id",
            "__param_queue",
            "__most_recent_step_id_param_fetched_for",
            "reset_step",
            "_clean_inflight_param_registry",
            "release_and_reset_all",
            "__submodule_order",
        )
    ),
    (f"{_SWAP}.optimizer_utils", "OptimizerSwapper"),
    (f"{_SWAP}.optimizer_utils", "OptimizerStateSwapInfo"),
    (f"{_SWAP}.optimizer_utils", "SwapTensorContext"),
    (f"{_SWAP}.optimizer_utils", "FlattenedTensorSwapInfo"),
    (f"{_SWAP}.utils", "SwapBufferManager"),
    (f"{_SWAP}.utils", "AIO_ALIGNED_BYTES"),
    (f"{_SWAP}.constants", "AIO_INTRA_OP_PARALLELISM"),
    (f"{_SWAP}.partitioned_param_swapper", "PartitionedParamStatus"),
    (f"{_SWAP}.partitioned_optimizer_swapper", "PartitionedOptimizerSwapper"),
    (f"{_SWAP}.pipelined_optimizer_swapper", "PipelinedOptimizerSwapper"),
    *(
        ("deepspeed.runtime.activation_checkpointing.checkpointing", name)
        for name in ("get_offloaded_activations_for_backward", "restore_offloaded_activations")
    ),
    ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam.__init__"),
    ("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam.step"),
    ("deepspeed.ops", "csrc/includes/cpu_adam.h"),
    # By their files: an import compiles Muon's kernels.
    (_ZERO, "muon/muon_optimizer.py"),
    (_ZERO, "muon/original_muon.py"),
    ("deepspeed.ops.lion.cpu_lion", "DeepSpeedCPULion.step"),
    ("deepspeed.ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad.step"),
)


def relied_on() -> list[tuple[str, str]]:
    """Return (module, name) of every definition whose code must be known.

    The optimizer class is left out, since WATCHED lists its relevant methods, and AsyncIOBuilder,
    since only its name is used.
    """
    by_name_only = (
        "AsyncIOBuilder",
        "DeepSpeedZeroOptimizer_Stage3",
        "DeepSpeedEngine.memascend",
    )
    seams = [(seam.module, seam.attribute) for seam in SEAMS if seam.attribute not in by_name_only]
    return [*seams, *WATCHED]
