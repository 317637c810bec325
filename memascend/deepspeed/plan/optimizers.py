"""Live optimizers, looked up in the table of known ones (`memascend.plan.optimizers`)."""

from __future__ import annotations

from typing import Any

import torch

from memascend.plan.optimizers import kind_of, state_count_of

#: A class of a known name in another package, or a subclass, is not known.
_KNOWN_PACKAGES = ("torch.optim.", "deepspeed.ops.")


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer may step a sub-group tile by tile."""
    kind = type(optimizer)
    return kind.__module__.startswith(_KNOWN_PACKAGES) and kind_of(kind.__name__).is_elementwise


def state_count(optimizer: Any) -> int:
    """Return the state tensors per parameter, of the group with most; a guess if not known."""
    name = type(optimizer).__name__
    return max(state_count_of(name, group) for group in optimizer.param_groups)


def state_dtype(optimizer: Any, master: torch.dtype, *, in_bf16: bool) -> torch.dtype:
    """Return the dtype of an optimizer's states: fp32, that of the master weights, or bf16."""
    if in_bf16:
        return torch.bfloat16
    return torch.float32 if getattr(optimizer, "fp32_optimizer_states", True) else master


def initial_state(
    optimizer: Any, group: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, float]] | None:
    """Return the state that an optimizer creates for a parameter before its first step.

    Scalars, and the fill value of each state tensor, by name; None if the optimizer is not known
    and must create its state itself.
    """
    kind = type(optimizer)
    start = kind_of(kind.__name__).start if is_elementwise(optimizer) else ()
    if not start:
        return None
    fills = dict.fromkeys(start, float(group.get("initial_accumulator_value", 0.0)))
    if kind.__module__.startswith("deepspeed."):
        return {"step": 0}, fills
    if group.get("amsgrad"):
        fills["max_exp_avg_sq"] = 0.0
    wide = torch.get_default_dtype() is torch.float64
    step = torch.tensor(0.0, dtype=torch.float64 if wide else torch.float32)
    return {"step": step}, fills
