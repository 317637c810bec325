"""Live optimizers, looked up in the table of known ones (`memascend.plan.optimizers`)."""

from __future__ import annotations

from typing import Any

import torch

from memascend.config.deepspeed import DeepSpeedSettings
from memascend.plan.optimizers import MOMENTUM, is_muon, kind_of, state_count_of

#: A class of a known name in another package, or a subclass, is not known.
_KNOWN_PACKAGES = ("torch.optim.", "deepspeed.ops.", "deepspeed.runtime.zero.muon.")
#: Dtypes of the second moment, by `streaming.optimizer.state_dtype`.
_SECOND_BESIDE_CODES = {"int8": torch.uint8, "int8/bf16": torch.bfloat16}


def named_as(settings: DeepSpeedSettings, optimizer: Any) -> DeepSpeedSettings:
    """Return settings that name Muon if the live optimizer is Muon, and another one if it is not.

    A script may make an optimizer that the JSON does not name.
    """
    name = type(optimizer).__name__
    if is_muon(name) == is_muon(settings.optimizer.type):
        return settings
    name = {"MuonWithAuxAdam": "Muon", "DeepSpeedCPUAdam": "AdamW"}.get(name, name)
    live = settings.optimizer.model_copy(update={"type": name})
    return settings.model_copy(update={"optimizer": live})


def is_elementwise(optimizer: Any) -> bool:
    """Return whether an optimizer may step a sub-group tile by tile."""
    kind = type(optimizer)
    return kind.__module__.startswith(_KNOWN_PACKAGES) and kind_of(kind.__name__).is_elementwise


def state_count(optimizer: Any) -> int:
    """Return the state tensors per parameter, of the group with most; a guess if not known."""
    name = type(optimizer).__name__
    return max(state_count_of(name, group) for group in optimizer.param_groups)


def state_dtype(optimizer: Any, master: torch.dtype, asked: str) -> torch.dtype:
    """Return the dtype of an optimizer's states: fp32, that of the master weights, or bf16.

    Of states that `moments` has it is fp32.

    Args:
        optimizer: The optimizer.
        master: Dtype of its master weights.
        asked: `streaming.optimizer.state_dtype`.
    """
    if asked == "bf16":
        return torch.bfloat16
    follows = asked == "fp32" and not getattr(optimizer, "fp32_optimizer_states", True)
    return master if follows else torch.float32


def moments(asked: str) -> dict[str, torch.dtype]:
    """Return the dtypes of Adam's moments by name, if the first one is in codes; else empty."""
    if asked not in _SECOND_BESIDE_CODES:
        return {}
    return {"exp_avg": torch.int8, "exp_avg_sq": _SECOND_BESIDE_CODES[asked]}


def initial_state(
    optimizer: Any, group: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, float]] | None:
    """Return the state that an optimizer creates for a parameter before its first step.

    Scalars, and the fill value of each state tensor, by name; None if the optimizer is not known
    and must create its state itself.
    """
    kind = type(optimizer)
    if is_muon(kind.__name__) and group["use_muon"]:
        return {}, {MOMENTUM: 0.0}
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
