"""Dtypes of master weights and of optimizer states: settings, requirements and refusals.

Neither torch nor DeepSpeed. Conflicts in a DeepSpeed JSON are refused before anything is allocated;
those that only the live optimizer shows are refused by its caller, with the same message.

Master weights in 16 bits (DeepSpeed's sections bf16 and fp16) are stepped in tiles by DeepSpeed's
own operator, which is bit-identical to CPU offload. DeepSpeed's swapper of whole sub-groups is not:
all of its buffers have the master weights' dtype, so it rounds Adam's fp32 moments to that in every
step. Adam's moments in bf16 are `streaming.optimizer.state_dtype`.
"""

from __future__ import annotations

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.errors import ConfigError

FP32, BF16, FP16 = "fp32", "bf16", "fp16"
#: By section of the DeepSpeed JSON.
_KEYS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16_master_weights_and_grads"),
    "fp16": "fp16_master_weights_and_grads",
}
#: Shown with every such run.
INEXACT = (
    'streaming.optimizer.state_dtype "bf16": Adam\'s moments are rounded to bf16 in every step, so '
    "losses and weights are not those of fp32 states"
)
#: Names in the DeepSpeed JSON that become DeepSpeedCPUAdam.
_OPTIMIZERS = ("adamw", "adam")


def narrow_key(settings: DeepSpeedSettings) -> str:
    """Return the key that asks for master weights in 16 bits; empty if they are in fp32."""
    found = (f"{name}.{key}" for name, key in _KEYS.items() if getattr(settings.halves[name], key))
    return next(found, "")


def master_dtype(settings: DeepSpeedSettings) -> str:
    """Return the dtype of master weights."""
    key = narrow_key(settings)
    if not key:
        return FP32
    return FP16 if key.startswith(FP16) else BF16


def state_dtype(block: MemAscendConfig, settings: DeepSpeedSettings) -> str:
    """Return the dtype of each state: fp32, unless the settings ask for another one."""
    if keeps_bf16(block):
        return BF16
    asked = any(half.bf16_optimizer_states for half in settings.halves.values())
    follows = asked or not settings.adam.fp32_optimizer_states
    return master_dtype(settings) if follows else FP32


def keeps_bf16(block: MemAscendConfig) -> bool:
    """Return whether states in bf16 are asked for."""
    return block.streaming.optimizer.state_dtype == "bf16"


# -- master weights in 16 bits ---------------------------------------------------------------------


def refusal_of_masters(key: str, found: str, remedy: str) -> ConfigError:
    """Return the error for the option `key`: the setting that conflicts, and the remedy."""
    return ConfigError(
        f"{key} keeps master weights in 16 bits. Only streaming.optimizer steps these with the "
        f"same results as CPU offload: {found}. {remedy}, or leave {key} out"
    )


def check_masters(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Raise ConfigError if the key's section is off, or the optimizer cannot step in tiles."""
    key = narrow_key(settings)
    if not key or settings.zero_optimization.offload_optimizer.device != "nvme":
        return
    name = key.partition(".")[0]
    half = settings.halves[name]
    if not half.enabled and "enabled" not in half.left_to_trainer:
        raise refusal_of_masters(key, f"{name}.enabled is false", "Set it to true")
    for needed, is_on in {
        "direct_nvme": block.direct_nvme.enabled,
        "streaming.optimizer": block.streaming.optimizer.enabled,
    }.items():
        if not is_on:
            raise refusal_of_masters(key, f"memascend.{needed}.enabled is false", "Turn it on")
    if keeps_bf16(block):
        found = 'memascend.streaming.optimizer.state_dtype="bf16" needs master weights in fp32'
        raise refusal_of_masters(key, found, "Leave state_dtype out")


# -- states in bf16 --------------------------------------------------------------------------------


def refusal_of_bf16(found: str, remedy: str) -> ConfigError:
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
        raise refusal_of_bf16(
            f"zero_optimization.offload_optimizer.device is {where!r}", 'Set it to "nvme"'
        )
    if not block.direct_nvme.enabled:
        raise refusal_of_bf16("memascend.direct_nvme.enabled is false", "Turn it on")
    found, remedy = why_not_cpu_adam(settings)
    if found:
        raise refusal_of_bf16(found, remedy)


def why_not_cpu_adam(settings: DeepSpeedSettings) -> tuple[str, str]:
    """Return (setting that prevents DeepSpeedCPUAdam, remedy); both empty if none does."""
    name = settings.optimizer.type
    if name.lower() not in _OPTIMIZERS:
        return f"optimizer.type is {name!r}", 'Set it to "AdamW" or "Adam"'
    if settings.adam.torch_adam:
        return "optimizer.params.torch_adam is true, which is torch's", "Take it out"
    return "", ""
