"""What a script reads and changes through deepspeed.utils.safe_get_* and safe_set_*.

Called by every rank between backward and step, and after a step. Reading must leave no trace;
a change must have the trace it has under CPU offload.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed import utils
from torch import nn

from .cases import Case

STATES = {
    "Adagrad": ("exp_avg_sq",),
    "Lion": ("exp_avg",),
    "client": ("average",),
    "schedule-free": ("z", "exp_avg_sq"),
}
ADAM_STATES = ("exp_avg", "exp_avg_sq")


def states_of(case: Case, weight: nn.Parameter) -> tuple[str, ...]:
    """The optimizer's states of a tensor: Muon has another one for matrices."""
    if getattr(weight, "use_muon", False):
        return ("momentum_buffer",)
    return STATES.get(case.optimizer_type, ADAM_STATES)


def before_step(case: Case, module: nn.Module) -> dict[str, str]:
    """Reads everything, changes gradients in every way there is, and reads again."""
    if case.accessors == "set":
        return {}
    found = read(case, module, "found")
    if case.accessors != "change":
        return found
    first, large, middle, small = chosen(module).values()
    set_grad(first, 0.5)
    utils.safe_set_local_grad(small, utils.safe_get_local_grad(small) * 2)
    utils.safe_set_local_grad(large, utils.safe_get_local_grad(large) * 0.75)
    if all(can_be_set_whole(weight) for weight in (middle, small)):
        utils.safe_update_full_grad_vectorized(
            [middle, small], lambda gradient, weight: gradient * 0.25 + 1e-3
        )
    return found | read(case, module, "changed")


def after_step(case: Case, module: nn.Module) -> dict[str, str]:
    """As before the step, for master weights and optimizer states.

    Or sets gradients that nobody has read: those of the next step, where none arrives.
    """
    if case.accessors == "set":
        for weight in module.parameters():
            set_pattern(weight)
        return read(case, module, "set")
    found = read(case, module, "found")
    if case.accessors != "change":
        return found
    first, large, middle, small = chosen(module).values()
    for weight in (first, middle):
        if not can_be_set_whole(weight):
            continue
        utils.safe_set_full_fp32_param(weight, utils.safe_get_full_fp32_param(weight) * 1.25)
        for state in states_of(case, weight):
            value = utils.safe_get_full_optimizer_state(weight, state)
            utils.safe_set_full_optimizer_state(weight, value * 0.5, state)
    for weight in (large, small):
        utils.safe_set_local_fp32_param(weight, utils.safe_get_local_fp32_param(weight) * 0.75)
        for state in states_of(case, weight):
            value = utils.safe_get_local_optimizer_state(weight, state)
            utils.safe_set_local_optimizer_state(weight, value * 2, state)
    return found | read(case, module, "changed")


def chosen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Four tensors that learn: the first, the largest after it, one between, the smallest."""
    named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    first, *others = named
    others.sort(key=lambda pair: -pair[1].ds_numel)
    return dict([first, others[0], others[len(others) // 2], others[-1]])


def read(case: Case, module: nn.Module, when: str) -> dict[str, str]:
    """Digests of everything an accessor gives."""
    values: dict[str, torch.Tensor | None] = {}
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            values[f"{name} frozen"] = utils.safe_get_full_fp32_param(weight)
    for name, weight in chosen(module).items():
        values[f"{name} master"] = utils.safe_get_full_fp32_param(weight)
        values[f"{name} gradient"] = utils.safe_get_full_grad(weight)
        local = {
            "master": utils.safe_get_local_fp32_param(weight),
            "gradient": utils.safe_get_local_grad(weight),
        }
        for state in states_of(case, weight):
            values[f"{name} {state}"] = utils.safe_get_full_optimizer_state(weight, state)
            local[state] = utils.safe_get_local_optimizer_state(weight, state)
        for what, part in local.items():
            values[f"{name} local {what}"] = own(weight, part)
    return {f"{when} {name}": describe(value) for name, value in values.items()}


def own(weight: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Without the padding behind the end of a tensor, which nobody has defined."""
    begin = dist.get_rank() * weight.partition_numel()
    return part.narrow(0, 0, max(0, min(part.numel(), weight.ds_numel - begin)))


def can_be_set_whole(weight: nn.Parameter) -> bool:
    """DeepSpeed's setters of whole tensors fail where the last rank's shard is padded."""
    return weight.ds_numel % dist.get_world_size() == 0


def set_grad(weight: nn.Parameter, factor: float) -> None:
    if can_be_set_whole(weight):
        utils.safe_set_full_grad(weight, utils.safe_get_full_grad(weight) * factor)
    else:
        utils.safe_set_local_grad(weight, utils.safe_get_local_grad(weight) * factor)


def set_pattern(weight: nn.Parameter) -> None:
    """Replace a gradient by one that depends on the places of elements alone."""
    if can_be_set_whole(weight):
        values = pattern(0, weight.ds_numel).view(weight.ds_shape)
        utils.safe_set_full_grad(weight, values)
    else:
        numel = weight.partition_numel()
        utils.safe_set_local_grad(weight, pattern(dist.get_rank() * numel, numel))


def pattern(begin: int, numel: int) -> torch.Tensor:
    return torch.arange(begin, begin + numel).remainder(7).sub(3).mul(1e-3)


def describe(value: torch.Tensor | None) -> str:
    if value is None:
        return "nothing"
    raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"


def layout(value: Any) -> Any:
    """A state dict with every tensor replaced by its dtype and shape, and no other values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return {str(key): layout(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [layout(item) for item in value]
    return type(value).__name__
