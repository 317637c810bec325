"""Fingerprints of the upstream definitions that the seams were written for.

Written by scripts/update_fingerprints.py; do not edit.
"""

from __future__ import annotations

VERSIONS: tuple[str, ...] = ("0.19.8",)

KNOWN: dict[str, tuple[str, ...]] = {
    "deepspeed.checkpoint.constants.FROZEN_PARAM_FRAGMENTS": ("5e808f5d3ad3ac9c",),
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad.step": ("bc50202af56d3c60",),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam.__init__": ("cb92e6a6b58b7b66",),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam.step": ("69b73feaa1e770e2",),
    "deepspeed.ops.csrc/includes/cpu_adam.h": ("7ef24766bfa7b565",),
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion.step": ("baa4c821d83a6bad",),
    "deepspeed.runtime.activation_checkpointing.checkpointing._get_cpu_offload_engine": (
        "5e02d192aecaf9ce",
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing.get_offloaded_activations_for_backward": (
        "540c6b1c1f43c75a",
    ),
    "deepspeed.runtime.activation_checkpointing.checkpointing.restore_offloaded_activations": (
        "743825170b888e0c",
    ),
    "deepspeed.runtime.base_optimizer.BackwardHookStateManager": ("71ea3b29da5c40e0",),
    "deepspeed.runtime.base_optimizer.ZeROOptimizer._backward_seen_this_step": (
        "58e0a56afe98512f",
    ),
    "deepspeed.runtime.base_optimizer.ZeROOptimizer._epilogue_ran_this_backward": (
        "99fff1f3b982cadf",
    ),
    "deepspeed.runtime.base_optimizer.ZeROOptimizer.get_param_comm_dtype": ("9d78ed5efc528d25",),
    "deepspeed.runtime.base_optimizer.ZeROOptimizer.is_gradient_accumulation_boundary": (
        "83ebeb78c15d8e25",
    ),
    "deepspeed.runtime.config.DeepSpeedConfig._param_dict": ("71e16f974d3e722c",),
    "deepspeed.runtime.engine.DeepSpeedEngine._backward_epilogue": ("6500536eeb915555",),
    "deepspeed.runtime.engine.DeepSpeedEngine._backward_post_hook": ("e6c8fb68e30dec06",),
    "deepspeed.runtime.engine.DeepSpeedEngine._backward_prologue": ("726e339fe1ebfbbe",),
    "deepspeed.runtime.engine.DeepSpeedEngine._config": ("970e5d1ff9381162",),
    "deepspeed.runtime.engine.DeepSpeedEngine._forward_epilogue": ("803438c04e9ae2bf",),
    "deepspeed.runtime.engine.DeepSpeedEngine._forward_prologue": ("1692bebff1acff81",),
    "deepspeed.runtime.engine.DeepSpeedEngine._get_all_ckpt_names": ("a24ccada572b829e",),
    "deepspeed.runtime.engine.DeepSpeedEngine._get_ckpt_name": ("dde27c9c2babb90c",),
    "deepspeed.runtime.engine.DeepSpeedEngine._get_rank_zero_ckpt_name": ("1746fb3d2d0d245f",),
    "deepspeed.runtime.engine.DeepSpeedEngine._get_zero_ckpt_name": ("d88d1f252d253431",),
    "deepspeed.runtime.engine.DeepSpeedEngine._get_zero_frozen_param_attributes": (
        "9aed7d78ae5e6c33",
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine._get_zero_param_shapes": ("e1cbc8cbd16cb07d",),
    "deepspeed.runtime.engine.DeepSpeedEngine._load_checkpoint": ("cbc95c0311716512",),
    "deepspeed.runtime.engine.DeepSpeedEngine._load_zero_checkpoint": ("38d46dbf7f811988",),
    "deepspeed.runtime.engine.DeepSpeedEngine._save_zero_checkpoint": ("c870e9b723128eee",),
    "deepspeed.runtime.engine.DeepSpeedEngine._zero3_consolidated_16bit_state_dict": (
        "4ab14658f1d8426b",
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine.autotp_size": ("2ea9589aa80bd58f",),
    "deepspeed.runtime.engine.DeepSpeedEngine.backward": ("86562af53c2bcfa8",),
    "deepspeed.runtime.engine.DeepSpeedEngine.bfloat16_enabled": ("7946e2cc0cf649de",),
    "deepspeed.runtime.engine.DeepSpeedEngine.checkpoint_engine": ("dc57cf7f3092b7bb",),
    "deepspeed.runtime.engine.DeepSpeedEngine.checkpoint_mp_rank": ("a277d5570d234831",),
    "deepspeed.runtime.engine.DeepSpeedEngine.forward": ("e38c3c4e16ef1a3d",),
    "deepspeed.runtime.engine.DeepSpeedEngine.global_rank": ("bc4cac001d0b046c",),
    "deepspeed.runtime.engine.DeepSpeedEngine.has_moe_layers": ("37332ab789bda8e3",),
    "deepspeed.runtime.engine.DeepSpeedEngine.is_gradient_accumulation_boundary": (
        "1360d25488f4bad1",
    ),
    "deepspeed.runtime.engine.DeepSpeedEngine.load_checkpoint": ("aba4062e507ce668",),
    "deepspeed.runtime.engine.DeepSpeedEngine.load_universal_checkpoint": ("50fee4feaccf9258",),
    "deepspeed.runtime.engine.DeepSpeedEngine.local_rank": ("a398eefc89122acb",),
    "deepspeed.runtime.engine.DeepSpeedEngine.lr_scheduler": ("da67cd4626cf0446",),
    "deepspeed.runtime.engine.DeepSpeedEngine.monitor": ("e1f48e848df845f5",),
    "deepspeed.runtime.engine.DeepSpeedEngine.mp_world_size": ("b2420edc8ba86846",),
    "deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint": ("f4b6b4383d73f0dc",),
    "deepspeed.runtime.engine.DeepSpeedEngine.seq_dp_world_size": ("f449de129eed5f7f",),
    "deepspeed.runtime.engine.DeepSpeedEngine.step": ("d1a33a28afc216e9",),
    "deepspeed.runtime.engine.DeepSpeedEngine.use_node_local_storage": ("55ddc7a61af233dd",),
    "deepspeed.runtime.engine.DeepSpeedEngine.zero_nvme_offload_optimizer": ("533190c4e05476e4",),
    "deepspeed.runtime.engine.DeepSpeedEngine.zero_optimization_partition_weights": (
        "badb8c2a990b81aa",
    ),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler.__init__": ("d5d8a6ad6bd66287",),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler.update_scale": ("879de1304de0aa76",),
    "deepspeed.runtime.swap_tensor.constants.AIO_INTRA_OP_PARALLELISM": ("23e6a5d0d9f8daeb",),
    "deepspeed.runtime.swap_tensor.optimizer_utils.FlattenedTensorSwapInfo": ("c73f98e30e12b32a",),
    "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerStateSwapInfo": ("6ffc1e0eab0c90db",),
    "deepspeed.runtime.swap_tensor.optimizer_utils.OptimizerSwapper": ("01a548a3190b0e27",),
    "deepspeed.runtime.swap_tensor.optimizer_utils.SwapTensorContext": ("19fb8a8d23945a04",),
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper.PartitionedOptimizerSwapper": (
        "45b833e91145052d",
    ),
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper.PartitionedParamStatus": (
        "ee166f2873a610ab",
    ),
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper.PipelinedOptimizerSwapper": (
        "5ccb256152b9613a",
    ),
    "deepspeed.runtime.swap_tensor.utils.AIO_ALIGNED_BYTES": ("080130aacc82f3b7",),
    "deepspeed.runtime.swap_tensor.utils.SwapBufferManager": ("2ebeb5260abfffec",),
    "deepspeed.runtime.torch_autocast.is_autocast_initialized": ("bf610cd6d900951d",),
    "deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig.set_pipeline": (
        "adc450b5fee894f7",
    ),
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": ("356d949340df4266",),
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.destroy": ("64142fab4d0d9794",),
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.setup_zero_stage3_hooks": (
        "612afc3f66acf0bf",
    ),
    "deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK": ("3e356582d76bd3d0",),
    "deepspeed.runtime.zero.parameter_offload.ZeROOrderedDict.__getitem__": ("979f838175199f10",),
    "deepspeed.runtime.zero.parameter_offload.ZeROOrderedDict._in_forward": ("29a124f5484a3674",),
    "deepspeed.runtime.zero.parameter_offload.ZeROOrderedDict._parent_module": (
        "cb85e3a74ec02d9f",
    ),
    "deepspeed.runtime.zero.partition_parameters.AsyncPartitionedParameterSwapper": (
        "2197a87e2d1f602b",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init._all_gather": ("eb86011ab5b0c487",),
    "deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param": (
        "f7a7fde30baf468b",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init._ensure_availability_of_partitioned_params": (
        "c23b0a8e1e2d9b89",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init._partition": ("3cda9a89ac825a5c",),
    "deepspeed.runtime.zero.partition_parameters.Init._partition_param": ("7fbef61d28d0e884",),
    "deepspeed.runtime.zero.partition_parameters.Init.ds_id": ("68c74db660056e9e",),
    "deepspeed.runtime.zero.partition_parameters.Init.ds_numel": ("d6c5b1678abf6ac8",),
    "deepspeed.runtime.zero.partition_parameters.Init.ds_status": ("5d6798d5f855e2c6",),
    "deepspeed.runtime.zero.partition_parameters.Init.ds_tensor": ("b965ccc18c37221f",),
    "deepspeed.runtime.zero.partition_parameters.Init.ds_zero_partition_rank": (
        "a766a8cda52335a8",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init.ds_zero_partition_world_size": (
        "362c4e1affbce032",
    ),
    "deepspeed.runtime.zero.partition_parameters.Init.param_swapper": ("03bb6ef55da96471",),
    "deepspeed.runtime.zero.partition_parameters.MultipleAllGatherHandles": ("92751238e9cc69b4",),
    "deepspeed.runtime.zero.partition_parameters.NoGatherCoalescedHandle": ("1d52aef714a7864f",),
    "deepspeed.runtime.zero.partition_parameters.NoGatherHandle": ("db72b5e887e0dac3",),
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus": ("28133cd0e09c419c",),
    "deepspeed.runtime.zero.partition_parameters._no_gather_coalesced": ("da965731e274a8a6",),
    "deepspeed.runtime.zero.partition_parameters.register_external_parameter": (
        "7ff1edb738d8b2ec",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.InflightParamRegistry.__setitem__": (
        "918a728f4b4b3f1c",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__all_gather_params": (
        "22da6b5c94c5eeea",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__most_recent_step_id_param_fetched_for": (
        "63d34feea089faf1",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__param_queue": (
        "be1aacefedcce212",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__params_to_release": (
        "ed670a6337f67e5f",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__step_id": (
        "589553dab8b4eeb1",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__submodule_order": (
        "d7c80b81ba9c45a6",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator._clean_inflight_param_registry": (
        "7910fe61efcc8776",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator._fetch_sub_module_impl": (
        "51afe8c0e736b0bb",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator._invalidate_trace": (
        "32aa5cfa39eae780",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.fetch_sub_module": (
        "daf94249226efec8",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.is_complete_trace": (
        "8566d43944db8494",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.release_and_reset_all": (
        "43e5c63feafcf627",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.reset_step": (
        "95288a67abdf9325",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.trace_prologue": (
        "2137a4edc555d09d",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator.iter_params": ("a1b2622b733dded5",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__avg_scatter_contiguous_grads": (
        "a5f3def498f2cb6c",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads": (
        "d528d97dbf7fa612",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__init__": ("3016df5217657fff",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._clear_fp32_optimizer_param_groups": (
        "3ebe429f954c6ac3",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_offloading": (
        "ab5d45dfc2c19929",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._configure_tensor_swapping": (
        "8d9da0769277d6c5",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._constant_buffered_norm2": (
        "2a3cf141ca6b6a7c",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions": (
        "ca5e5d7405dc70eb",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._create_param_groups_fp16_flat_cpu_memory": (
        "1c0dca9a3525ae31",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._finalize_offload_gradient_accumulation": (
        "7883fc1095571a5f",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._fp32_state_allgather": (
        "76d6dd4eff0af111",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_fp32_grad_state_partition": (
        "fb0a3a856fbea3a2",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition": (
        "b9e399970006533e",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_loss_scale": (
        "1cbe9c493b1f5a99",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_param_partition_group": (
        "2eab662e1151bbdf",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_param_partition_rank": (
        "0f3279e4e46f9461",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._move_to_flat_buffer": (
        "baada16e2425677f",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._optimizer_states_and_gradient_swap_out": (
        "6400632381b88754",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._optimizer_step": (
        "1897cfe36e84ebf4",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._partition_all_parameters": (
        "7698e5d8fe612b90",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._partitioned_params_swap_out": (
        "49905d9893f09e86",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._post_step": ("0fef35ae6ad91912",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._prepare_sub_group": (
        "2c5f727c6d11c72d",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters": (
        "4974d1eab5c28fb3",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._release_sub_group": (
        "623b452e8baaff28",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._restore_from_bit16_weights": (
        "5243a92d74c6dd7f",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._rigid_load_state_dict": (
        "d2383bc409ee0b2a",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._rigid_state_dict": (
        "cdb03e6660ceaa55",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._set_fp32_optimizer_param_groups": (
        "419d9ed9713fddfd",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer": (
        "902a16562dfcf0a3",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._swap_in_sub_group_to_flat_buffer": (
        "8c155a1fa7342cab",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._swappable_optimizer_subgroup": (
        "897eccd271206b0c",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._unflatten_partitioned_parameters": (
        "5a89ca727576f04d",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._writeback_swap_state": (
        "bd38f14746ee648d",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.clear_backward_seen_flag": (
        "8342e5a266e44852",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.complete_grad_norm_calculation_for_cpu_offload": (
        "cf83c30616baa179",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.destroy": ("6c149a3286957783",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.get_param_id": (
        "93e227bc7e5b4e9c",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.has_overflow": (
        "195d41084cf32951",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue": (
        "52e8d895b7f1e467",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states": (
        "a3abaeba737f3737",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.loss_scale": ("11008f7b4fb617fc",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.partition_grads": (
        "244071f3639c4bf5",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.reset_swap_buffers": (
        "c4110444d4723ab4",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.set_local_grad_for_param": (
        "f084e1d1587d9bf1",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.set_local_hp_param": (
        "19cecc10d759c635",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.step": ("15e41120d6f0dbf5",),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads": (
        "ad50fee2989d8d54",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.update_fp32_grad_for_param_vectorized": (
        "24c8c433c0a0a8ce",
    ),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.zero_grad": ("b997ffc74de1abdf",),
    "deepspeed.runtime.zero.stage3.IPGBucketZ3.clear_params": ("08d0c38a2ad6593e",),
    "deepspeed.runtime.zero.utils.get_norm_dtype": ("b1bf2a6c77117a93",),
    "deepspeed.utils.nvtx.instrument_w_nvtx": ("ae42738c768357a9",),
    "deepspeed.utils.z3_leaf_module": ("10c7edb2907ba0db",),
}

#: Whole files of the release that this was last written for.
FILES: dict[str, str] = {
    "deepspeed.checkpoint.constants": "6e26da22b697ce35",
    "deepspeed.ops.adagrad.cpu_adagrad": "415f95f4a988493f",
    "deepspeed.ops.adam.cpu_adam": "634fc0da21d455e2",
    "deepspeed.ops.lion.cpu_lion": "61574937ee02b74b",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "41b137d163806112",
    "deepspeed.runtime.base_optimizer": "b42fb2d11c617638",
    "deepspeed.runtime.config": "4e45da379fdeb14c",
    "deepspeed.runtime.engine": "e35eaa313874d2b3",
    "deepspeed.runtime.fp16.loss_scaler": "91a5886bcc79e083",
    "deepspeed.runtime.swap_tensor.constants": "9661adba29c67545",
    "deepspeed.runtime.swap_tensor.optimizer_utils": "08a9817649bc8a85",
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": "95352bf4a1e95c40",
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": "51469488efe8a143",
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": "762aa49995f1210b",
    "deepspeed.runtime.swap_tensor.utils": "901afbc8ac93c7c8",
    "deepspeed.runtime.torch_autocast": "ca6013e1fcd59da0",
    "deepspeed.runtime.zero.offload_config": "3ad8d23fd24a19c6",
    "deepspeed.runtime.zero.parameter_offload": "7fec7e04a5d00a56",
    "deepspeed.runtime.zero.partition_parameters": "c7866c302ef1a975",
    "deepspeed.runtime.zero.partitioned_param_coordinator": "a43fd966c88dc369",
    "deepspeed.runtime.zero.stage3": "4ff3fdb4cbabaddf",
    "deepspeed.runtime.zero.utils": "3211114393b1a156",
    "deepspeed.utils.nvtx": "1ca82972b9f95b35",
    "deepspeed.utils.z3_leaf_module": "ebd37c6d4d0aa36b",
}
