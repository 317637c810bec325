"""What is known of optimizers: which work element by element, and what state they begin with.

An elementwise optimizer updates each element from that element's own weight, gradient and state, so
a sub-group may be stepped tile by tile. All others (LAMB, Adafactor, Muon, whatever is not listed)
need the sub-group whole. The plan keeps the same list by name (`plan_request.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion

from memascend.plan.request import state_count_of

#: Exactly these classes; a subclass may do anything.
ELEMENTWISE = (
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    DeepSpeedCPUAdagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer may step a sub-group tile by tile."""
    return type(optimizer) in ELEMENTWISE


def state_count(optimizer: Any) -> int:
    """State tensors per parameter, of the group that has most; a guess for unknown classes."""
    name = type(optimizer).__name__
    return max(state_count_of(name, group) for group in optimizer.param_groups)


def initial_state(
    optimizer: Any, group: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, float]] | None:
    """What an optimizer makes of a parameter before its first step.

    Args:
        optimizer: Any optimizer.
        group: The parameter's group of hyperparameters.

    Returns:
        Scalars by name, and the value of every element of each state tensor by name; None when it
        is not known, and the optimizer has to make its state itself.
    """
    kind = type(optimizer)
    if kind in (DeepSpeedCPUAdam, DeepSpeedCPULion):
        return {"step": 0}, {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    if kind is DeepSpeedCPUAdagrad:
        return {"step": 0}, {"exp_avg_sq": 0.0}
    if kind is torch.optim.Adagrad:
        return {"step": _scalar(0.0)}, {"sum": float(group["initial_accumulator_value"])}
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        states = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
        if group["amsgrad"]:
            states["max_exp_avg_sq"] = 0.0
        return {"step": _scalar(0.0)}, states
    return None


def _scalar(value: float) -> torch.Tensor:
    """A step count as torch's optimizers keep it."""
    wide = torch.get_default_dtype() is torch.float64
    return torch.tensor(value, dtype=torch.float64 if wide else torch.float32)
