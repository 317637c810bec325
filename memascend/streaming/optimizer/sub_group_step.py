"""Steps of sub-groups, as the optimizer stream takes them, and helpers for optimizer state.

Knows torch and names of keys; neither where bytes are stored nor which optimizer it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memascend.streaming.gradients.accumulation import Factor
from memascend.streaming.optimizer.sub_group import Member, State, SubGroup


class FusedUpdate(Protocol):
    """One step of an optimizer on a tile."""

    def __call__(
        self,
        *,
        begin: int,
        gradient: torch.Tensor,
        factor: float,
        weight: torch.Tensor,
        values: State,
        scales: torch.Tensor | None,
        output: torch.Tensor | None,
    ) -> None:
        """Step in place.

        Args:
            begin: First element of the tile in its sub-group.
            gradient: The gradient in its stored dtype; may be overwritten.
            factor: Multiplied into the gradient first.
            weight: The master weights; updated.
            values: The optimizer's state; updated.
            scales: fp32, of states in codes, side by side (`kernels.codes`); updated. None if
                there are none.
            output: Receives the new weights in its own dtype; None if they are not needed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroupStep:
    """One step of a sub-group.

    Attributes:
        name: The sub-group.
        parameter: The optimizer's parameter for it; empty between steps.
        states: The optimizer's state by parameter.
        update: Runs one step of the optimizer on `parameter` and its `grad`.
        factor: Multiplied into gradients first (unscaling and clipping).
        members: Its parameters; each receives its new value.
        fused: Used instead of `update` once the sub-group has its states.
    """

    name: str
    parameter: torch.Tensor
    states: Mapping[torch.Tensor, State]
    update: Callable[[], None]
    factor: Factor
    members: Sequence[Member]
    fused: FusedUpdate | None = None


@dataclass(frozen=True, slots=True)
class EarlyStep:
    """A step that may follow, of a sub-group that has all of its states.

    Attributes:
        name: The sub-group.
        fused: One step that does not change the optimizer.
        factor: Multiplied into gradients first.
        members: Its parameters, all of them in the store.
    """

    name: str
    fused: FusedUpdate
    factor: float
    members: Sequence[Member]


def early_key(key: str) -> str:
    """Return the key of the new value of `key`, until an early step is taken over."""
    return f"early.{key}"


def as_number(factor: Factor) -> float | None:
    """Return a factor as a number; None for a tensor that is not 0-dim, or not on the CPU."""
    if not isinstance(factor, torch.Tensor):
        return float(factor)
    return None if factor.dim() or factor.device.type != "cpu" else float(factor)


def step_by_update(
    fused: FusedUpdate, values: State, weight: torch.Tensor, update: torch.Tensor
) -> None:
    """Step whole weights in place by updates of matrices, both 1-D and of one dtype."""
    fused(
        begin=0,
        gradient=update,
        factor=1.0,
        weight=weight,
        values=values,
        scales=None,
        output=None,
    )


def step_nothing(step: SubGroupStep) -> None:
    """Let an optimizer count a step of a sub-group whose tiles were all stepped early."""
    if step.fused is None:
        step.update()
        return
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")  # not torch's defaults
    values = step.states[step.parameter]
    step.fused(
        begin=0,
        gradient=nothing,
        factor=1.0,
        weight=nothing,
        values=values,
        scales=nothing,
        output=None,
    )


def is_state_tensor(name: str, value: object, numel: int) -> bool:
    """Return whether a state value is a tensor with one element per element of the parameter."""
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == (numel,)


def copy_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy; tensors are cloned."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def empty_parameter(parameter: torch.Tensor, values: State, group: SubGroup) -> None:
    """Empty a parameter, its gradient and its states, so that they do not refer to tile memory."""
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    for name in group.states:
        if isinstance(values.get(name), torch.Tensor):
            values[name].data = values[name].data.new_empty(0)
