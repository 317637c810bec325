"""Master weights in 16 bits (DeepSpeed's sections bf16 and fp16): what they need, what lacks it.

Neither torch nor DeepSpeed. They are stepped in tiles by DeepSpeed's own operator, which gives the
bits of CPU offload. DeepSpeed's swapper of whole sub-groups does not: all of its buffers are of the
master weights' dtype, and it rounds Adam's fp32 moments to that in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed_json import device, flag, section
from memascend.errors import ConfigError
from memascend.plan.states import keeps_bf16

FP32_BYTES, NARROW_BYTES = 4, 2
_BF16, _FP16 = "bf16_master_weights_and_grads", "fp16_master_weights_and_grads"
#: By the section that has it.
_KEYS = {"bf16": _BF16, "bfloat16": _BF16, "fp16": _FP16}


def narrow_key(ds_config: Mapping[str, Any]) -> str:
    """Return the key that asks for master weights in 16 bits; empty where they are in fp32."""
    for name, key in _KEYS.items():
        if flag(section(ds_config, name), key, False):
            return f"{name}.{key}"
    return ""


def master_itemsize(ds_config: Mapping[str, Any]) -> int:
    """Return the bytes of a master weight."""
    return NARROW_BYTES if narrow_key(ds_config) else FP32_BYTES


def state_itemsize(block: MemAscendConfig, ds_config: Mapping[str, Any]) -> int:
    """Return the bytes of an element of each state: fp32, but for what asks for another dtype."""
    if keeps_bf16(block):
        return NARROW_BYTES
    parameters = section(section(ds_config, "optimizer"), "params")
    follows = not flag(parameters, "fp32_optimizer_states", True) or any(
        flag(section(ds_config, name), "bf16_optimizer_states", False) for name in _KEYS
    )
    return master_itemsize(ds_config) if follows else FP32_BYTES


def refusal_of_masters(key: str, found: str, remedy: str) -> ConfigError:
    """Return the error for master weights in 16 bits that cannot be.

    Args:
        key: The option that asks for them.
        found: The setting that stands in their way.
        remedy: The change that helps.
    """
    return ConfigError(
        f"{key} keeps master weights in 16 bits, which streaming.optimizer steps with the bits of "
        f"CPU offload, and nothing else: {found}. {remedy}, or leave {key} out"
    )


def check_masters(block: MemAscendConfig, ds_config: Mapping[str, Any]) -> None:
    """Compare the key with what else the JSON states.

    Raises:
        ConfigError: Its section is not enabled, or the tiles cannot serve.
    """
    key = narrow_key(ds_config)
    zero = section(ds_config, "zero_optimization")
    if not key or device(section(zero, "offload_optimizer")) != "nvme":
        return
    name = key.partition(".")[0]
    precision = section(ds_config, name)
    if precision.get("enabled") != "auto" and not flag(precision, "enabled", False):
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
