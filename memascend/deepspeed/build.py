"""Builds the parameter swapper that zero.Init asks for: ours, or stock's over our engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memascend.config import active_config
from memascend.deepspeed.activation import attach
from memascend.deepspeed.param_swapper import ParameterSwapper
from memascend.streaming.parameters import ParameterStream


def wrap_param_swapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces the name AsyncPartitionedParameterSwapper in zero.Init's module."""

    @functools.wraps(original, updated=())
    def build(ds_config: Any, model_dtype: torch.dtype) -> Any:
        raw_config = ds_config._param_dict
        config = active_config(raw_config)
        if config is None:
            return original(ds_config, model_dtype)
        attachment = attach(raw_config, ds_config.zero_config.offload_param.nvme_path)
        if config.buffer_pool.enabled:
            stream = ParameterStream(
                store=attachment.runtime.io,
                pool=attachment.runtime.pool,
                prefetch_bytes=config.buffer_pool.prefetch_bytes,
            )
            block_bytes = int(ds_config.aio_config.get("block_size", 0))
            return ParameterSwapper(
                attachment=attachment,
                stream=stream,
                dtype=model_dtype,
                swappable_bytes_min=block_bytes,
            )
        with attachment.serving_aio("parameter buffers"):
            swapper = original(ds_config, model_dtype)
        # The optimizer finds the attachment here, so that a model has one runtime.
        swapper.memascend_attachment = attachment
        return swapper

    return build
