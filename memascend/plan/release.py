"""Settings that a run would refuse, as far as the JSON, the model and DeepSpeed's files show.

Neither torch nor DeepSpeed. Settings that an older supported release cannot serve are refused by
name, with the release that can: the installed DeepSpeed is known by its files.
"""

from __future__ import annotations

from memascend.config import installed
from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.installed import (
    CHECKPOINT_INPUTS,
    INNER_PASSES,
    KEPT_POWERS,
    MUON,
    MUON_BY_MATRIX,
    SUMS_IN_FP32,
    refusal,
    require,
    require_whole_steps,
)
from memascend.errors import ConfigError
from memascend.plan.derive import Plan
from memascend.plan.knobs import sub_group_numels
from memascend.plan.optimizer_dtypes import (
    check_fewer,
    check_masters,
    narrow_key,
    why_not_cpu_adam,
)
from memascend.plan.optimizers import is_muon
from memascend.plan.request import (
    NEEDS_WHOLE_GRADIENTS,
    check_limit_can_be_kept,
    sections_off,
    why_whole_steps,
)
from memascend.plan.shapes import ModelShapes


def check_settings(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Refuse settings that conflict, or that the installed DeepSpeed cannot serve.

    Raises:
        ConfigError: Names the settings and the remedy.
    """
    check_limit_can_be_kept(block, settings)
    check_fewer(block, settings)
    check_masters(block, settings)
    check_release(block, settings)


def check_release(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Refuse settings that need another release of DeepSpeed than the installed one.

    Raises:
        ConfigError: Names the setting, the installed release and the first one that serves it.
    """
    zero, off = settings.zero_optimization, sections_off(block)
    if block.micro_batches is not None:
        require(INNER_PASSES, "memascend.micro_batches", "leave it out")
        is_wide = settings.data_types.grad_accum_dtype == "fp32" and settings.precision != "fp32"
        if is_wide and not block.sums_slices:
            require(
                SUMS_IN_FP32,
                'memascend.micro_batches with data_types.grad_accum_dtype "fp32"',
                '"micro_batches": {"reduction": "slice"}',
            )
    uses_muon = is_muon(settings.optimizer.type)
    if uses_muon:
        require(MUON, 'optimizer.type "Muon"')
    if zero.offload_optimizer.device == "nvme":
        needed = [name for name in ("direct_nvme", "streaming.optimizer") if name in off]
        reason = f"{needed[0]} is off" if needed else why_whole_steps(settings)
        if uses_muon and not installed.is_able(MUON_BY_MATRIX):
            reason = NEEDS_WHOLE_GRADIENTS
        if reason:
            require_whole_steps(reason)
    if zero.offload_param.device == "nvme" and "buffer_pool" in off:
        require_whole_steps("buffer_pool is off")
    if block.activations.enabled and settings.activation_checkpointing.cpu_checkpointing:
        require(
            CHECKPOINT_INPUTS,
            "activation_checkpointing.cpu_checkpointing with memascend.activations",
            "leave cpu_checkpointing out: activations go to the drive without it",
        )


# -- tiles of Adam ---------------------------------------------------------------------------------


def check_tiles(
    shapes: ModelShapes, plan: Plan, block: MemAscendConfig, settings: DeepSpeedSettings
) -> None:
    """Refuse tiles that the installed release would step with other results than CPU offload.

    Args:
        shapes: The model.
        plan: The plan for it, with the number of elements of a tile.
        block: The active block.
        settings: The DeepSpeed JSON.

    Raises:
        ConfigError: A sub-group has more than one tile, and its Adam cannot be fused.
    """
    largest_numel = max(sub_group_numels(shapes, plan.request), default=0)
    if largest_numel > plan.tile_numel and (reason := why_tiles_differ(block, settings)):
        raise refusal_of_tiles(reason)


def why_tiles_differ(block: MemAscendConfig, settings: DeepSpeedSettings) -> str:
    """Return the setting that makes tiles differ from CPU offload; empty if none does.

    Only DeepSpeed's own step before 0.19.0 does, if a sub-group has more than one tile.
    """
    is_on_drive = settings.zero_optimization.offload_optimizer.device == "nvme"
    is_adam = why_not_cpu_adam(settings) == ("", "")
    if not is_on_drive or not is_adam or installed.is_able(KEPT_POWERS):
        return ""
    if not block.streaming.optimizer.fused:
        return "streaming.optimizer.fused is false"
    key = narrow_key(settings)
    return f"{key} keeps master weights in 16 bits" if key else ""


def refusal_of_tiles(reason: str) -> ConfigError:
    """Return the error for Adam that steps more than one tile by itself, for a reason."""
    return refusal(KEPT_POWERS, f"Adam that is not fused in more than one tile, since {reason},")
