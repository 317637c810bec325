"""Adam's moments in bf16 (`streaming.optimizer.state_dtype`): what they need, and what lacks it.

Neither torch nor DeepSpeed. What a DeepSpeed JSON shows is refused before anything is made; what
only the live optimizer shows, by whoever sees it, in the same words.
"""

from __future__ import annotations

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.errors import ConfigError

#: For people, wherever such a run is shown.
INEXACT = (
    'streaming.optimizer.state_dtype "bf16": Adam\'s moments are rounded to bf16 in every step, so '
    "losses and weights are not those of fp32 states"
)
#: Of the DeepSpeed JSON: those that become DeepSpeedCPUAdam.
_OPTIMIZERS = ("adamw", "adam")


def keeps_bf16(block: MemAscendConfig) -> bool:
    """Return whether states in bf16 are asked for."""
    return block.streaming.optimizer.state_dtype == "bf16"


def refusal(found: str, remedy: str) -> ConfigError:
    """Return the error for states in bf16 that cannot be.

    Args:
        found: What is there instead of what they need.
        remedy: What to do about it.
    """
    return ConfigError(
        'memascend.streaming.optimizer.state_dtype="bf16" needs DeepSpeedCPUAdam, stepped in one '
        f"pass in tiles: {found}. {remedy}, or leave state_dtype out"
    )


def check_state_dtype(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Compare the key with what else the JSON states.

    Raises:
        ConfigError: The optimizer is on no drive, or is another one.
    """
    if not keeps_bf16(block):
        return
    where = settings.zero_optimization.offload_optimizer.device
    if where != "nvme":
        raise refusal(
            f"zero_optimization.offload_optimizer.device is {where!r}", 'Set it to "nvme"'
        )
    if not block.direct_nvme.enabled:
        raise refusal("memascend.direct_nvme.enabled is false", "Turn it on")
    found, remedy = why_not_cpu_adam(settings)
    if found:
        raise refusal(found, remedy)


def why_not_cpu_adam(settings: DeepSpeedSettings) -> tuple[str, str]:
    """Return what makes another optimizer than DeepSpeedCPUAdam, and the remedy; else nothing."""
    name = settings.optimizer.type
    if name.lower() not in _OPTIMIZERS:
        return f"optimizer.type is {name!r}", 'Set it to "AdamW" or "Adam"'
    if settings.adam.torch_adam:
        return "optimizer.params.torch_adam is true, which is torch's", "Take it out"
    return "", ""
