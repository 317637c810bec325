"""What the optimizer path calls a sub-group, its members, and the optimizer's state of it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memascend.base.interfaces import TensorIO
from memascend.errors import TornStepError

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


class Wholeness:
    """Whether the values of all sub-groups belong to the same step."""

    def __init__(self) -> None:
        self._due_count = 0  # sub-groups of the walk that are still to be stepped
        self._is_torn = False

    @property
    def is_torn(self) -> bool:
        """Whether some values are new and others old."""
        return self._is_torn

    def begin(self, count: int) -> None:
        """A walk over so many sub-groups begins.

        Raises:
            TornStepError: As `check`.
        """
        self.check()
        self._due_count = count

    def note_change(self) -> None:
        """A value is about to be new while others are old."""
        self._is_torn = True

    def note_stepped(self) -> None:
        """A sub-group has all its new values."""
        self._due_count -= 1
        self._is_torn = self._due_count > 0

    def mend(self) -> None:
        """All values were replaced by such as belong together."""
        self._is_torn = False

    def check(self) -> None:
        """Refuses to go on with values of two steps.

        Raises:
            TornStepError: An error or an interrupt ended a walk, or a load, half-way.
        """
        if self._is_torn:
            raise TornStepError(
                "the last optimizer step or load ended half-way, so some weights have new values "
                "and others old ones. cause: the error that was raised then. fix: load a checkpoint"
            )


def make_anew(store: TensorIO, key: str, nbytes: int) -> None:
    """Room for a key all of which is about to be written in parts.

    After a failed write the store gives nothing of a key before it is written in one piece; a key
    that is made anew has no such past.

    Raises:
        StoreFullError: There is none.
    """
    store.discard(key=key)
    store.reserve(key=key, nbytes=nbytes)


def is_state_tensor(name: str, value: object, numel: int) -> bool:
    """Whether a value of the optimizer's state has an element for each of the parameter's."""
    return isinstance(value, torch.Tensor) and name != "step" and value.shape == (numel,)


def clone(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that an optimizer cannot change."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def let_go(parameter: torch.Tensor, values: State, group: SubGroup) -> None:
    """Takes the tile's memory away from a parameter and its states."""
    parameter.grad = None
    parameter.data = parameter.data.new_empty(0)
    for name in group.states:
        if isinstance(values.get(name), torch.Tensor):
            values[name].data = values[name].data.new_empty(0)
