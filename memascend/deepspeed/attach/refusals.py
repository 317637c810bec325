"""Refuses a configuration that cannot work with an active block, before weights are loaded."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.errors import ConfigError
from memascend.plan.optimizer_dtypes import refusal_of_quantized
from memascend.system.files import is_replaceable

_PACKAGE = Path(__file__).parents[2]
_TURN_OFF = 'turn memascend off with "memascend": {"enabled": false}'


def check_core() -> None:
    """Raise ImportError if the compiled core is missing, as in a clone that was not built."""
    try:
        importlib.import_module("memascend._core")
    except ImportError as error:
        raise ImportError(
            f"memascend was imported from {_PACKAGE}, and its compiled core cannot be: {error}. "
            "likely cause: a clone, which hides the installed package from a program that is "
            "started in it. fix: start the program in another folder, or type `pip install -e .` "
            "in the clone"
        ) from error


def check_config(settings: DeepSpeedSettings) -> None:
    """Raise ConfigError for settings that cannot work with an active block."""
    zero = settings.zero_optimization
    if zero.stage != 3:
        raise ConfigError(
            f"memascend works with ZeRO stage 3, zero_optimization.stage is {zero.shown_stage}. "
            f"Set it to 3, or {_TURN_OFF}"
        )
    if error := refusal_of_quantized(settings.optimizer.type):
        raise error
    device = zero.offload_optimizer.device
    if settings.optimizer.type.lower() == "lamb" and device != "none":
        raise ConfigError(
            'optimizer.type "Lamb" steps tensors on a GPU alone, and zero_optimization.'
            f'offload_optimizer.device "{device}" keeps master weights in host memory: '
            'DeepSpeed\'s CPU offload fails as well. Set optimizer.type to "AdamW", or leave '
            "offload_optimizer out"
        )
    on_drive = [
        name
        for name in ("offload_param", "offload_optimizer")
        if getattr(zero, name).device == "nvme"
    ]
    if not on_drive:
        raise ConfigError(
            "memascend has nothing to do: neither zero_optimization.offload_param.device nor "
            'zero_optimization.offload_optimizer.device is "nvme". Set at least one of them, or '
            f"{_TURN_OFF}"
        )
    for name in on_drive:
        if not getattr(zero, name).nvme_path:
            raise ConfigError(
                f"zero_optimization.{name}.nvme_path is missing: name a directory on the drive"
            )
    refused = {
        "zero_optimization.zenflow": bool(zero.zenflow),
        "zero_optimization.offload_optimizer.super_offload": zero.offload_optimizer.super_offload,
        "aio.use_gds": settings.aio.use_gds,
        "checkpoint.writer.decoupled": (
            "offload_optimizer" in on_drive and settings.checkpoint.writer.decoupled
        ),
        "compile.deepcompile": settings.compile.deepcompile,
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{key} cannot be combined with memascend: both replace the same parts. "
                f"Remove {key}, or {_TURN_OFF}"
            )


def check_report(config: MemAscendConfig) -> None:
    """Raise ConfigError for a report that cannot be written, before training begins."""
    if config.report is None:
        return
    path = Path(config.report)
    folder = path.parent
    is_open = folder.is_dir() and os.access(folder, os.W_OK, effective_ids=True)
    if not is_open or not is_replaceable(path):
        raise ConfigError(
            f"memascend.report={config.report!r} cannot be written: {folder.absolute()} is no "
            "folder that this user can write, or the name is that of a folder, link or device. "
            "Create the folder, or name another file"
        )
