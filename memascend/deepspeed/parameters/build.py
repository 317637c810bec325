"""Builds the parameter swapper for zero.Init: ours, or stock's with our store."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.base.device_memory import released_bytes_max
from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.attach.attach import attach
from memascend.deepspeed.parameters.swapper import SWAPPABLE_BYTES_MIN, ParameterSwapper

log = logging.getLogger(__name__)


def wrap_param_swapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the name AsyncPartitionedParameterSwapper in zero.Init's module."""

    @functools.wraps(original, updated=())
    def build(ds_config: Any, model_dtype: torch.dtype) -> Any:
        config = getattr(ds_config, "memascend", None)  # set when the config is constructed
        if config is None:
            return original(ds_config, model_dtype)
        settings = parse_deepspeed(ds_config._param_dict)
        attachment = attach(config, settings, settings.zero_optimization.offload_param.nvme_path)
        _note_inactive_streaming(config)
        if config.buffer_pool.enabled:
            runtime = attachment.runtime
            return ParameterSwapper(
                attachment=attachment,
                stream=runtime.parameters,
                dtype=model_dtype,
                swappable_bytes_min=max(SWAPPABLE_BYTES_MIN, settings.aio.block_size),
                lock=runtime.lock,
                is_alone=dist.get_world_size() == 1,
                new_event=runtime.new_event,
                released_bytes_max=released_bytes_max(get_accelerator().total_memory()),
            )
        with attachment.serving_aio("parameter buffers"):
            swapper = original(ds_config, model_dtype)
        # The optimizer takes the attachment from here, so that a model has one runtime.
        swapper.memascend_attachment = attachment
        return swapper

    return build


def _note_inactive_streaming(config: MemAscendConfig) -> None:
    off = [name for name in ("buffer_pool", "direct_nvme") if not getattr(config, name).enabled]
    if config.streaming.parameters.enabled and off and dist.get_rank() == 0:
        log.warning(
            "memascend: streaming.parameters is not used: it needs %s, which %s off",
            " and ".join(off),
            "is" if len(off) == 1 else "are",
        )
