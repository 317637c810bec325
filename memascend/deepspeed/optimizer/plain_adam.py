"""Conditions under which a fused step can replace a DeepSpeedCPUAdam's own.

Each check returns the reason why it cannot, in words; an empty string if it can.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_NUMBERS = ("lr", "betas", "eps", "weight_decay")


def fp32(value: float) -> float:
    """Round to fp32; a value out of its range becomes infinity, as in C."""
    return ctypes.c_float(value).value


def why_not_plain_numbers(group: Mapping[str, Any]) -> str:
    """Return why hyperparameters give no coefficients; a beta of 1 would divide by zero."""
    numbers = (group["lr"], group["eps"], group["weight_decay"], *group["betas"])
    are_plain = all(isinstance(number, (int, float)) for number in numbers)
    if are_plain and all(0 <= fp32(beta) < 1 for beta in group["betas"]):
        return ""
    found = ", ".join(f"{name}={group[name]}" for name in _NUMBERS)
    return f"its hyperparameters are tensors, or out of range: {found}"


def why_not_plain_step(optimizer: Any) -> str:
    """Return a reason if step() is replaced, or has hooks that may read gradients or weights."""
    step = vars(optimizer).get("step")
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    is_own = step is None or getattr(step, "_wrapped_by_lr_sched", False)
    if is_own and not any(hooks):
        return ""
    return "its step() has hooks, or is not the class's own"
