"""Settings that an older supported release of DeepSpeed cannot serve, refused by name.

Neither torch nor DeepSpeed: the installed DeepSpeed is known by its files.
"""

from __future__ import annotations

from memascend.config import installed
from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.installed import (
    CHECKPOINT_INPUTS,
    MUON,
    MUON_BY_MATRIX,
    require,
    require_whole_steps,
)
from memascend.plan.optimizers import is_muon
from memascend.plan.request import NEEDS_WHOLE_GRADIENTS, sections_off, why_whole_steps


def check_release(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Refuse settings that need another release of DeepSpeed than the installed one.

    Raises:
        ConfigError: Names the setting, the installed release and the first one that serves it.
    """
    zero, off = settings.zero_optimization, sections_off(block)
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
