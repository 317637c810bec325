"""What the optimizer path calls a sub-group, its members, and the optimizer's state of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: Optimizer state of one parameter: tensors shaped as the parameter, and scalars.
State = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter's shard in a sub-group, and where its value goes after the update.

    Attributes:
        offset: First element in the sub-group.
        numel: Elements.
        dtype: The parameter's own.
        key: Its name in the store; None when it lives in memory.
        tensor: The shard in memory, flat, on any device; None when it is in the store.
    """

    offset: int
    numel: int
    dtype: torch.dtype
    key: str | None = None
    tensor: torch.Tensor | None = None


@dataclass(slots=True)
class SubGroup:
    """What the optimizer takes for one parameter.

    Attributes:
        name: Unique; its keys hold it.
        numel: Elements on this rank.
        states: Dtype of each state in the store, in the optimizer's order.
        fills: States that have not been written yet: every element has this value.
    """

    name: str
    numel: int
    states: dict[str, torch.dtype] = field(default_factory=dict)
    fills: dict[str, float] = field(default_factory=dict)

    def key(self, state: str | None = None) -> str:
        """The store's name for the master weights, or for a state."""
        return f"state.{self.name}.{state}" if state else f"master.{self.name}"
