"""Refusing a configuration that cannot work with an active block, before a weight is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memascend.config.deepspeed_json import device, flag, section, value, whole
from memascend.errors import ConfigError

_TURN_OFF = 'turn memascend off with "memascend": {"enabled": false}'


def check_config(ds_config: Mapping[str, Any]) -> None:
    """Refuse what cannot work together with an active block.

    Raises:
        ConfigError: Names the keys, the values and what to do.
    """
    zero = section(ds_config, "zero_optimization")
    stage = whole(zero, "stage", 0)
    if stage != 3:
        raise ConfigError(
            f"memascend works with ZeRO stage 3, zero_optimization.stage is {stage}. Set it "
            f"to 3, or {_TURN_OFF}"
        )
    offload = {name: section(zero, name) for name in ("offload_param", "offload_optimizer")}
    on_drive = [name for name in offload if device(offload[name]) == "nvme"]
    if not on_drive:
        raise ConfigError(
            "memascend has nothing to do: neither zero_optimization.offload_param.device nor "
            'zero_optimization.offload_optimizer.device is "nvme". Set at least one of them, or '
            f"{_TURN_OFF}"
        )
    for name in on_drive:
        if not offload[name].get("nvme_path"):
            raise ConfigError(
                f"zero_optimization.{name}.nvme_path is missing: name a directory on the drive"
            )
    writer = section(section(ds_config, "checkpoint"), "writer")
    refused = {
        "zero_optimization.zenflow": bool(value(zero, "zenflow", None)),
        "zero_optimization.offload_optimizer.super_offload": flag(
            offload["offload_optimizer"], "super_offload", False
        ),
        "aio.use_gds": flag(section(ds_config, "aio"), "use_gds", False),
        "checkpoint.writer.decoupled": (
            "offload_optimizer" in on_drive and flag(writer, "decoupled", False)
        ),
        "compile.deepcompile": flag(section(ds_config, "compile"), "deepcompile", False),
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{key} cannot be combined with memascend: both replace the same parts. "
                f"Remove {key}, or {_TURN_OFF}"
            )
