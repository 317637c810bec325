"""Settings that an older supported release of DeepSpeed cannot serve, refused by name.

Neither torch nor DeepSpeed: the installed DeepSpeed is known by its files.
"""

from __future__ import annotations

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.installed import (
    CHECKPOINT_INPUTS,
    MUON,
    WHOLE_STEPS,
    Ability,
    installed_version,
    is_able,
)
from memascend.errors import ConfigError
from memascend.plan.request import sections_off, why_whole_steps


def check_release(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Refuse settings that need another release of DeepSpeed than the installed one.

    Raises:
        ConfigError: Names the setting, the installed release and the first one that serves it.
    """
    zero, off = settings.zero_optimization, sections_off(block)
    if settings.optimizer.type.lower() == "muon":
        require(MUON, 'optimizer.type "Muon"')
    if zero.offload_optimizer.device == "nvme":
        needed = [name for name in ("direct_nvme", "streaming.optimizer") if name in off]
        reason = f"{needed[0]} is off" if needed else why_whole_steps(settings)
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


def require_whole_steps(reason: str) -> None:
    """Refuse steps in whole sub-groups on a drive if the installed DeepSpeed cannot make them.

    Args:
        reason: Why they are necessary.

    Raises:
        ConfigError: The installed release cannot.
    """
    require(WHOLE_STEPS, f"a step in DeepSpeed's own buffers, since {reason},")


def require(ability: Ability, what: str, remedy: str = "change that") -> None:
    """Refuse a setting if the installed DeepSpeed lacks an ability.

    Args:
        ability: The ability that the setting needs.
        what: The setting.
        remedy: What helps besides another release.

    Raises:
        ConfigError: The installed release lacks it.
    """
    if not is_able(ability):
        raise ConfigError(
            f"{what} needs DeepSpeed {ability.since} or later, and DeepSpeed "
            f"{installed_version()} is installed, which lacks {ability.what}. Run: pip install "
            f"'deepspeed>={ability.since},<0.20', or {remedy}"
        )
