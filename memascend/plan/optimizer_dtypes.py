"""Dtypes of master weights and of optimizer states: settings, requirements and refusals.

Neither torch nor DeepSpeed. Conflicts in a DeepSpeed JSON are refused before anything is allocated;
those that only the live optimizer shows are refused by its caller, with the same message.

Master weights in 16 bits (DeepSpeed's sections bf16 and fp16) are stepped in tiles by DeepSpeed's
own operator, which is bit-identical to CPU offload. DeepSpeed's swapper of whole sub-groups is not:
all of its buffers have the master weights' dtype, so it rounds Adam's fp32 moments to that in every
step. Fewer bits of Adam's moments are `streaming.optimizer.state_dtype`, and of master weights
`streaming.optimizer.master_dtype`.
"""

from __future__ import annotations

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.errors import ConfigError
from memascend.plan.optimizers import is_muon

FP32, BF16, FP16 = "fp32", "bf16", "fp16"
#: Moments in codes of 8 bits; the second one in bf16.
INT8, INT8_BF16 = "int8", "int8/bf16"
#: Master weights as a bf16 parameter and 8 bits.
BF16_8 = "bf16+8"
#: By section of the DeepSpeed JSON.
_KEYS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16_master_weights_and_grads"),
    "fp16": "fp16_master_weights_and_grads",
}
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
    narrow = block.streaming.optimizer.state_dtype
    if narrow != FP32:
        return narrow
    asked = any(half.bf16_optimizer_states for half in settings.halves.values())
    follows = asked or not settings.adam.fp32_optimizer_states
    return master_dtype(settings) if follows else FP32


def fewer_bits(block: MemAscendConfig) -> str:
    """Return the settings that round values in every step, as key="value"; empty if none does."""
    optimizer = block.streaming.optimizer
    asked = {"state_dtype": optimizer.state_dtype, "master_dtype": optimizer.master_dtype}
    return " and ".join(f'{key}="{value}"' for key, value in asked.items() if value != FP32)


def inexactness(block: MemAscendConfig) -> str:
    """Return the text that is shown with every run of `fewer_bits`."""
    return (
        f"streaming.optimizer.{fewer_bits(block)} rounds values of the optimizer in every step, "
        "so losses and weights are not those of fp32"
    )


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
    if fewer := fewer_bits(block):
        found = f"memascend.streaming.optimizer.{fewer} needs master weights in fp32"
        raise refusal_of_masters(key, found, f"Leave {_keys(fewer)} out")


# -- fewer bits ------------------------------------------------------------------------------------


def refusal_of_fewer(fewer: str, found: str, remedy: str) -> ConfigError:
    """Return the error for `fewer_bits`: the setting that conflicts, and the remedy."""
    return ConfigError(
        f"memascend.streaming.optimizer.{fewer} needs DeepSpeedCPUAdam, stepped in one pass in "
        f"tiles: {found}. {remedy}, or leave {_keys(fewer)} out"
    )


def check_fewer(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Raise ConfigError unless DeepSpeedCPUAdam steps on a drive, through direct_nvme."""
    fewer = fewer_bits(block)
    if not fewer:
        return
    where = settings.zero_optimization.offload_optimizer.device
    if where != "nvme":
        found = f"zero_optimization.offload_optimizer.device is {where!r}"
        raise refusal_of_fewer(fewer, found, 'Set it to "nvme"')
    if not block.direct_nvme.enabled:
        raise refusal_of_fewer(fewer, "memascend.direct_nvme.enabled is false", "Turn it on")
    found, remedy = why_not_cpu_adam(settings)
    if found:
        raise refusal_of_fewer(fewer, found, remedy)
    if block.streaming.optimizer.master_dtype == BF16_8:
        if is_muon(settings.optimizer.type):
            raise refusal_of_muon()
        _check_parameters(block, settings)


def refusal_of_muon() -> ConfigError:
    """Return the error for master weights of 24 bits with Muon."""
    return ConfigError(
        f'memascend.streaming.optimizer.master_dtype="{BF16_8}" is for Adam: with Muon, whose '
        "updates are small beside its weights, 24 bits have not been tried. Leave master_dtype out"
    )


def _check_parameters(block: MemAscendConfig, settings: DeepSpeedSettings) -> None:
    """Raise ConfigError unless parameters may be a part of master weights."""
    where = settings.zero_optimization.offload_param.device
    found = ""
    if settings.precision != BF16:
        found, remedy = f"they are in {settings.precision}", "Turn bf16 on"
    elif where != "nvme":
        found = f"zero_optimization.offload_param.device is {where!r}"
        remedy = 'Set it to "nvme"'
    elif not block.streaming.parameters.enabled:
        found, remedy = "memascend.streaming.parameters.enabled is false", "Turn it on"
    elif "max_in_cpu" in settings.zero_optimization.offload_param.stated and (
        block.host_memory_limit is None and settings.zero_optimization.offload_param.max_in_cpu
    ):
        found = "zero_optimization.offload_param.max_in_cpu keeps some in memory"
        remedy = "Set memascend.host_memory_limit, which overrides it"
    if found:
        raise ConfigError(
            f'memascend.streaming.optimizer.master_dtype="{BF16_8}" stores 8 bits beside bf16 '
            f"parameters on the drive: {found}. {remedy}, or leave master_dtype out"
        )


def _keys(fewer: str) -> str:
    return " and ".join(part.partition("=")[0] for part in fewer.split(" and "))


def refusal_of_quantized(optimizer: str) -> ConfigError | None:
    """Return the error for another package's quantized or paged optimizer; None: it is neither.

    Args:
        optimizer: Its name in the DeepSpeed JSON, or its class with the module.
    """
    name = optimizer.rpartition(".")[2].lower().replace("_", "")
    is_narrow = any(bits in name for bits in ("4bit", "8bit", "fp8"))
    packages = ("bitsandbytes.", "torchao.")
    if not optimizer.startswith(packages) and not is_narrow and not name.startswith("paged"):
        return None
    return ConfigError(
        f"the optimizer {optimizer} keeps quantized or paged states of its own, for weights on the "
        "device, and ZeRO-3 with offload cannot step with it. fix: let DeepSpeed make the "
        'optimizer ("optimizer": {"type": "AdamW", "params": {...}} in the DeepSpeed JSON, or '
        'optim="adamw_torch" in the Trainer), and set memascend.streaming.optimizer.state_dtype to '
        '"int8": then Adam\'s moments have 8 bits'
    )


def why_not_cpu_adam(settings: DeepSpeedSettings) -> tuple[str, str]:
    """Return (setting that prevents DeepSpeedCPUAdam, remedy); both empty if none does.

    Muon has one for its other parameters.
    """
    name = settings.optimizer.type
    if name.lower() not in _OPTIMIZERS and not is_muon(name):
        return f"optimizer.type is {name!r}", 'Set it to "AdamW", "Adam" or "Muon"'
    if settings.adam.torch_adam:
        return "optimizer.params.torch_adam is true, which is torch's", "Take it out"
    return "", ""
