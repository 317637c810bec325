"""What is done to the tiles of a sub-group, and what an optimizer has of them between two.

Knows torch and names of keys; neither where bytes lie nor which optimizer it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memascend.streaming.sub_groups import Member, State, SubGroup
from memascend.streaming.window import Factor


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
        output: torch.Tensor | None,
    ) -> None:
        """Step in place.

        Args:
            begin: First element of the tile, counted in its sub-group.
            gradient: In whatever dtype it is stored; may be overwritten.
            factor: What it is multiplied by first.
            weight: The master weights.
            values: The optimizer's state, which is brought forward.
            output: Becomes the new weights in its own dtype.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroupStep:
    """One step of a sub-group.

    Attributes:
        name: The sub-group.
        parameter: What the optimizer knows it as; empty between steps.
        states: The optimizer's state by parameter.
        update: One step of the optimizer on `parameter` and its `grad`.
        factor: What gradients are multiplied by first (unscaling and clipping).
        members: Its parameters; each gets its new value.
        fused: Taken instead of `update` by a sub-group that has all of its states.
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
    """A step that may come, of a sub-group that has all of its states.

    Attributes:
        name: The sub-group.
        fused: Leaves the optimizer as it is.
        factor: What gradients are multiplied by first.
        members: Its parameters, all of them in the store.
    """

    name: str
    fused: FusedUpdate
    factor: float
    members: Sequence[Member]


def early_key(key: str) -> str:
    """Return the store's name for what a key is to hold once an early step is taken."""
    return f"early.{key}"


def as_number(factor: Factor) -> float | None:
    """Return a factor that fp32 is multiplied by as fp32; None for a tensor that may promote it."""
    if not isinstance(factor, torch.Tensor):
        return float(factor)
    return None if factor.dim() or factor.device.type != "cpu" else float(factor)


def step_nothing(step: SubGroupStep) -> None:
    """Have an optimizer count a step of which every element has been stepped early."""
    if step.fused is None:
        raise AssertionError(f"{step.name} was stepped early, and has no fused step")
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
    values = step.states[step.parameter]
    step.fused(begin=0, gradient=nothing, factor=1.0, weight=nothing, values=values, output=None)


def is_state_tensor(name: str, value: object, numel: int) -> bool:
    """Return whether a value of the state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == (numel,)


def copy_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Make a copy that an optimizer cannot change."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def let_go(parameter: torch.Tensor, values: State, group: SubGroup) -> None:
    """Take the tile's memory away from a parameter and its states."""
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    for name in group.states:
        if isinstance(values.get(name), torch.Tensor):
            values[name].data = values[name].data.new_empty(0)
