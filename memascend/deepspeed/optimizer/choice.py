"""Chooses which streams serve a model's optimizer: gradients, and the step in tiles.

The arguments of DeepSpeed's optimizer decide, before it is constructed. If a stream is on in the
config and cannot be used, the log says why, once, and DeepSpeed's own code runs, with the memory
that it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.torch_autocast import is_autocast_initialized

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.installed import (
    MUON,
    MUON_BY_MATRIX,
    is_able,
    require,
    require_whole_steps,
)
from memascend.deepspeed.optimizer.tiled import TiledSteps
from memascend.deepspeed.optimizer.whole import WholeSteps
from memascend.errors import ConfigError
from memascend.plan.optimizer_dtypes import fewer_bits, refusal_of_fewer, refusal_of_masters
from memascend.plan.request import (
    HAS_OTHER_ADAM,
    KEEPS_MOMENTUM,
    LEAVES_A_PART,
    NEEDS_WHOLE_GRADIENTS,
    SCALES_IN_EVERY_CALL,
)

log = logging.getLogger(__name__)

#: The two ways of stepping; both have the same methods. One thread at a time may call.
StepPath = TiledSteps | WholeSteps


def choose_streams(config: MemAscendConfig, arguments: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (gradients are streamed, master weights and states are streamed).

    Both are False for an optimizer that is not on a drive.

    Args:
        config: The active block.
        arguments: The arguments of `DeepSpeedZeroOptimizer_Stage3`, by name.

    Raises:
        ConfigError: A stream cannot be used and is needed: for the host memory limit, for 16-bit
            master weights, for 16-bit moments, or since this DeepSpeed has no other way.
    """
    if type(arguments.get("init_optimizer")).__name__ == "MuonWithAuxAdam":
        require(MUON, "the optimizer MuonWithAuxAdam")
    if not _is_on_drive(arguments.get("offload_optimizer_config")):
        return False, False
    # Imported late: the import compiles its kernels.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    both = "" if config.direct_nvme.enabled else "it needs direct_nvme, which is off"
    step = both
    on_drive = _is_on_drive(arguments.get("offload_param_config"))
    if not step and on_drive and not config.buffer_pool.enabled:
        step = "it needs buffer_pool, which is off"
    elif not step and arguments.get("offload_ratio") != 1.0:
        step = LEAVES_A_PART
    elif not step and is_autocast_initialized():
        step = SCALES_IN_EVERY_CALL
    if isinstance(optimizer := arguments.get("init_optimizer"), MuonWithAuxAdam):
        # A subclass may step in another way. Gradients are streamed for tiles alone.
        is_known = type(optimizer) is MuonWithAuxAdam and is_able(MUON_BY_MATRIX)
        why_not = _why_not_by_matrix(config, arguments) if is_known else NEEDS_WHOLE_GRADIENTS
        both = step = step or why_not
    for name in ("bf16", "fp16") if step else ():
        if arguments.get(f"{name}_master_weights_and_gradients"):
            key = f"{name}.{name}_master_weights_and_grads"
            raise refusal_of_masters(key, f"it cannot serve, since {step}", "Change that")
    streaming = config.streaming
    if step or not streaming.optimizer.enabled:
        require_whole_steps(step or "streaming.optimizer is off")
    return (
        streaming.gradients.enabled and _serves("gradients", both, config),
        streaming.optimizer.enabled and _serves("optimizer", step, config),
    )


def _why_not_by_matrix(config: MemAscendConfig, arguments: Mapping[str, Any]) -> str:
    """Return why Muon's updates cannot be made matrix by matrix; empty if they can."""
    streaming, optimizer = config.streaming, arguments["init_optimizer"]
    if not (streaming.gradients.enabled and streaming.optimizer.enabled):
        return "Muon needs streaming.gradients and streaming.optimizer, and one of them is off"
    if arguments.get("save_muon_momentum_buffer_in_memory"):
        return KEEPS_MOMENTUM
    if any(arguments.get(f"{name}_master_weights_and_gradients") for name in ("bf16", "fp16")):
        return "Muon needs master weights in fp32"
    kinds = {group["use_muon"] for group in optimizer.param_groups}
    for group in optimizer.param_groups:
        if {getattr(one, "use_muon", False) for one in group["params"]} != {group["use_muon"]}:
            return "a parameter group of Muon has parameters with and without use_muon"
    if False in kinds and type(optimizer.aux_optimizer) is not DeepSpeedCPUAdam:
        return HAS_OTHER_ADAM
    return ""


def _serves(name: str, reason: str, config: MemAscendConfig) -> bool:
    """Return whether a stream that is on can be used: no `reason` is given. Log the reason."""
    if reason and config.host_memory_limit is not None:
        raise ConfigError(
            f"memascend.host_memory_limit={config.host_memory_limit!r} cannot be kept: "
            f"streaming.{name} cannot serve, since {reason}. Change that, or leave the limit out"
        )
    if reason and name == "optimizer" and (fewer := fewer_bits(config)):
        found = f"streaming.optimizer cannot serve, since {reason}"
        raise refusal_of_fewer(fewer, found, "Change that")
    if reason and dist.get_rank() == 0:
        log.warning(
            "memascend: streaming.%s is not used: %s. Host memory grows with the model",
            name,
            reason,
        )
    return not reason


def _is_on_drive(offload_config: Any) -> bool:
    return offload_config is not None and offload_config.device == "nvme"


def reduction_of_sums(config: MemAscendConfig, settings: DeepSpeedSettings) -> dict[str, Any]:
    """Return DeepSpeed's argument for reductions in fp32, if gradients of slices are added in fp32.

    Micro-steps are added up behind the reduction, slices before it: in 16 bits it would round the
    sums.
    """
    if config.micro_batches is None or settings.data_types.grad_accum_dtype != "fp32":
        return {}
    if settings.precision != "fp32" and not hasattr(torch.Tensor, "grad_dtype"):
        raise ConfigError(
            'memascend.micro_batches with data_types.grad_accum_dtype "fp32" needs a torch whose '
            "autograd adds up gradients in fp32 (Tensor.grad_dtype), and torch "
            f"{torch.__version__} is installed: slices would be added up in 16 bits. fix: a newer "
            "torch, or leave grad_accum_dtype out"
        )
    if config.sums_slices or settings.communication_data_type:
        return {}
    return {"communication_data_type": torch.float32}
