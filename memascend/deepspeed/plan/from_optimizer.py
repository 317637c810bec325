"""The plan of a live model: DeepSpeed's settings and shapes as input of `memascend.plan`.

While zero.Init builds a model its shapes are not known yet, so fixed shares of the limit are used
until the optimizer is constructed. Then all memory is resized at once, as planned.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.base.sizes import STAGING_SLOT_BYTES
from memascend.base.units import page_down
from memascend.config.block import MemAscendConfig
from memascend.config.deepspeed import DeepSpeedSettings
from memascend.config.environment import local_world_size
from memascend.config.limit import parse_limit
from memascend.deepspeed.plan.optimizers import is_elementwise, moments, state_count, state_dtype
from memascend.plan.derive import Plan, PlanRequest, default_limit, derive
from memascend.plan.knobs import (
    PARAMETER_SLOTS_BYTES_MIN,
    STAGING_SLOT_BYTES_MIN,
    LimitTooSmallError,
)
from memascend.plan.optimizers import is_muon
from memascend.plan.shapes import ModelShapes, TensorShape, from_module
from memascend.runtime import PARAMETER_BUDGET_BYTES
from memascend.system.memory import memory_available, memory_total

#: Shares of the limit for parameters and for one staging slot, while the model is built.
PARAMETER_SHARE = 1 / 4
STAGING_SHARE = 1 / 32
PARAMETER_BYTES_RANGE = (PARAMETER_SLOTS_BYTES_MIN, PARAMETER_BUDGET_BYTES)
STAGING_SLOT_BYTES_RANGE = (STAGING_SLOT_BYTES_MIN, STAGING_SLOT_BYTES)
#: Dtypes as a plan names them.
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
#: Elements of a tensor so large that a larger one would not need more memory.
_ANY_NUMEL = 1 << 32


def stated_limit(config: MemAscendConfig) -> int | None:
    """Return the limit of this rank in bytes, the same on every rank; None if none is stated.

    A fraction refers to the memory of the machine, or of this process's control group, divided by
    the number of local ranks.
    """
    value = config.host_memory_limit
    if value is None:
        return None
    is_fraction = not isinstance(value, str) and value <= 1
    available = memory_total() // local_world_size() if is_fraction else 0
    limit = parse_limit(value, available=available)
    return None if limit is None else least_of_ranks(limit)


def check_smallest(
    config: MemAscendConfig, settings: DeepSpeedSettings, limit_bytes: int | None
) -> None:
    """Raise LimitTooSmallError for a limit below the minimum of a large model, at the start."""
    if limit_bytes is not None:
        large = TensorShape("any tensor", (_ANY_NUMEL,), trainable=True)
        model = ModelShapes("any model", (large,) * 3, {})
        request = PlanRequest.from_deepspeed(settings, block=config, world=dist.get_world_size())
        request = dataclasses.replace(request, verify="off")  # its memory depends on the model
        if request.is_tiled:
            derive(model, request=request, limit_bytes=limit_bytes)


def building_sizes(limit_bytes: int | None) -> dict[str, int]:
    """Return the bytes of parameters and of a staging slot while the model is built, by name."""
    if limit_bytes is None:
        limit_bytes = least_of_ranks(memory_available() // local_world_size() // 2)
    return {
        "parameter_budget_bytes": _clamp(limit_bytes * PARAMETER_SHARE, PARAMETER_BYTES_RANGE),
        "staging_slot_bytes": _clamp(limit_bytes * STAGING_SHARE, STAGING_SLOT_BYTES_RANGE),
    }


def plan_for(
    optimizer: Any,
    module: torch.nn.Module,
    config: MemAscendConfig,
    settings: DeepSpeedSettings,
    limit: int | None,
) -> Plan:
    """Derive the plan of a ZeRO-3 optimizer (`Upstream`) whose sub-groups are formed.

    Without a stated limit the available memory is the limit.

    Raises:
        LimitTooSmallError: The smallest sizes do not fit in the limit.
    """
    request = _request(optimizer, config, settings)
    shapes = from_module(module)
    if limit is not None:
        return derive(shapes, request=request, limit_bytes=limit)
    plan = derive(shapes, request=request)
    available = memory_available() // local_world_size()
    fallback = least_of_ranks(default_limit(plan.host_bytes, available=available))
    if fallback >= plan.host_bytes:
        return plan
    try:
        return derive(shapes, request=request, limit_bytes=fallback)
    except LimitTooSmallError as error:
        raise LimitTooSmallError(
            "memascend.host_memory_limit is not set, so the free memory of this machine limits it: "
            f"{error}",
            limit_bytes=error.limit_bytes,
            minimum_bytes=error.minimum_bytes,
            needed=error.needed,
        ) from error


def _request(optimizer: Any, config: MemAscendConfig, settings: DeepSpeedSettings) -> PlanRequest:
    base = optimizer.base
    kind, elementwise = type(base), is_elementwise(base)
    is_cpu_adam = kind.__name__ == "DeepSpeedCPUAdam"
    is_clipped_muon = is_muon(kind.__name__) and optimizer.norm_max > 0
    is_fused = is_cpu_adam or (elementwise and is_muon(kind.__name__))
    request = PlanRequest.from_deepspeed(
        settings, block=config, world=dist.get_world_size(), local_world=local_world_size()
    )
    master, asked = optimizer.master_dtype, config.streaming.optimizer.state_dtype
    return dataclasses.replace(
        request,
        # Machines may differ in their volumes; sizes must be equal, and gathers' turns with them.
        drive_count=least_of_ranks(request.drive_count),
        precision=_NAMES[optimizer.stored_dtype],
        arriving_dtype=_NAMES[optimizer.reduction_dtype],
        accumulation_dtype=_NAMES[optimizer.accumulation_dtype],
        master_dtype=_NAMES[master],
        state_dtype=asked if moments(asked) else _NAMES[state_dtype(base, master, asked)],
        # With its module, since its class may have the name of a known optimizer.
        optimizer=kind.__name__ if elementwise else f"{kind.__module__}.{kind.__name__}",
        is_elementwise=elementwise,
        state_count=state_count(base),
        sub_group_numels=tuple(optimizer.numels),
        during_backward=request.during_backward and is_fused and not is_clipped_muon,
        tries_during_backward=request.tries_during_backward and is_cpu_adam,
        guesses=optimizer.norm_max > 0,
        applies_updates=request.applies_updates and not optimizer.norm_max,
        overlaps=request.overlaps and is_fused,
        wants_split_master=request.wants_split_master and is_fused,
    )


def least_of_ranks(nbytes: int) -> int:
    """Return the minimum over all ranks, so that they plan with the same number."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return nbytes
    device = get_accelerator().current_device_name()
    least = torch.tensor([nbytes], dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def _clamp(nbytes: float, bounds: tuple[int, int]) -> int:
    least, most = bounds
    return page_down(max(least, min(most, int(nbytes))))
