"""Converts the shards of trained parameters to the dtype of the optimizer.

DeepSpeed takes the dtype of the first trained parameter for all, and with CPU offload copies their
shards into flat buffers of that dtype. A shard has another dtype if its module was cast after
zero.Init: `module.to(dtype)` casts only the placeholder of an absent parameter, not its shard.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.parameters.gather import swapper_of
from memascend.errors import ConfigError

log = logging.getLogger(__name__)


def recast_parameters(
    params: Sequence[Any], dtype: torch.dtype, *, attachment: Attachment, pin_memory: bool
) -> None:
    """Convert shards to a dtype, on the drive or in host memory.

    Args:
        params: All trained parameters; none of them is gathered.
        dtype: The optimizer's dtype.
        attachment: The model's attachment.
        pin_memory: Page-lock converted shards in host memory.

    Raises:
        ConfigError: DeepSpeed's own swapper holds a shard of another dtype.
        StoreError: The drive failed.
    """
    others = [param for param in params if _stored_dtype(param) != dtype]
    if others and dist.get_rank() == 0:
        log.warning(
            "memascend: %d of %d parameters were partitioned as %s and are trained and stored in "
            "%s, as with CPU offload: DeepSpeed takes the dtype of the first parameter for all of "
            "them. Likely cause: modules were cast after deepspeed.zero.Init",
            len(others),
            len(params),
            " or ".join(sorted({_name(_stored_dtype(param)) for param in others})),
            _name(dtype),
        )
    for param in others:
        swapper = swapper_of(param)
        if param.ds_tensor.final_location != "nvme":
            _recast_in_memory(param.ds_tensor, dtype, attachment, pin_memory=pin_memory)
        elif swapper is not None:
            swapper.recast(param, dtype)
        else:
            raise ConfigError(
                f"a parameter was partitioned as {_name(_stored_dtype(param))} and is to be "
                f"trained in {_name(dtype)}, the dtype of the first one given to the optimizer, "
                "which DeepSpeed's own swapper cannot do. Likely cause: modules were cast after "
                "deepspeed.zero.Init, and memascend.buffer_pool is off. Turn it on, or cast all "
                "modules or none"
            )


def _stored_dtype(param: Any) -> torch.dtype:
    """Return the dtype of a shard; in DeepSpeed's own swapper the swapper's dtype decides."""
    is_stock = param.ds_tensor.final_location == "nvme" and swapper_of(param) is None
    dtype: torch.dtype = param.nvme_swapper.dtype if is_stock else param.ds_tensor.dtype
    return dtype


def _recast_in_memory(
    shard: torch.Tensor, dtype: torch.dtype, attachment: Attachment, *, pin_memory: bool
) -> None:
    with attachment.host_buffers("small parameters"):
        data = torch.empty(shard.numel(), dtype=dtype, device=OffloadDeviceEnum.cpu)
    if pin_memory:
        data = get_accelerator().pin_memory(data)
    shard.data = data.copy_(shard)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
