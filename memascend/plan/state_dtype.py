"""Adam's moments in bf16 (`streaming.optimizer.state_dtype`): requirements and refusals.

Neither torch nor DeepSpeed. Conflicts in a DeepSpeed JSON are refused before anything is allocated.
Conflicts that only the live optimizer shows are refused by its caller, with the same message.
"""

from __future__ import annotations

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.errors import ConfigError

#: Shown with every such run.
INEXACT = (
    'streaming.optimizer.state_dtype "bf16": Adam\'s moments are rounded to bf16 in every step, so '
    "losses and weights are not those of fp32 states"
)
#: Names in the DeepSpeed JSON that become DeepSpeedCPUAdam.
_OPTIMIZERS = ("adamw", "adam")


def keeps_bf16(block: MemAscendConfig) -> bool:
    """Return whether states in bf16 are asked for."""
    return block.streaming.optimizer.state_dtype == "bf16"


def refusal(found: str, remedy: str) -> ConfigError:
    """Return the error for states in bf16: the setting that conflicts, and the remedy."""
    return ConfigError(
        'memascend.streaming.optimizer.state_dtype="bf16" needs DeepSpeedCPUAdam, stepped in one '
        f"pass in tiles: {found}. {remedy}, or leave state_dtype out"
    )


def check_state_dtype(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Raise ConfigError unless DeepSpeedCPUAdam steps on a drive, through direct_nvme."""
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
    """Return (setting that prevents DeepSpeedCPUAdam, remedy); both empty if none does."""
    name = settings.optimizer.type
    if name.lower() not in _OPTIMIZERS:
        return f"optimizer.type is {name!r}", 'Set it to "AdamW" or "Adam"'
    if settings.adam.torch_adam:
        return "optimizer.params.torch_adam is true, which is torch's", "Take it out"
    return "", ""
