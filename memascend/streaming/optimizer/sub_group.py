"""The record of one sub-group: its size, its keys in the store, and the form of its master weights.

Knows torch's dtypes and names; neither the store nor tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from memascend.streaming.optimizer.halves import Run

#: Optimizer state of one parameter: tensors shaped as the parameter, and scalars.
State = MutableMapping[str, Any]
#: Dtypes of the halves of master weights.
HIGH_DTYPE, LOW_DTYPE = torch.bfloat16, torch.int16


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter's shard in a sub-group, and the location of its value.

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

    def overlap(self, begin: int, numel: int) -> tuple[int, int]:
        """Return (first element in the sub-group, count) of the overlap with a range of it.

        The count is not positive if there is no overlap.
        """
        first = max(begin, self.offset)
        return first, min(begin + numel, self.offset + self.numel) - first


class MasterForm(Enum):
    """The form of a sub-group's master weights; `_FOLLOWING` has the transitions."""

    WHOLE = auto()  #: In one key, as the optimizer sees them.
    #: The members' own values, and the low halves that these lack. Signs of `flag_state` are flags.
    ROUNDED = auto()
    #: Exact high halves, and low halves: the members' values may differ. Signs of `flag_state` have
    #: no meaning.
    EXACT = auto()


_FOLLOWING: dict[MasterForm, set[MasterForm]] = {
    MasterForm.ROUNDED: {MasterForm.EXACT, MasterForm.WHOLE},  # a member, or a weight, changes
    MasterForm.EXACT: {MasterForm.ROUNDED, MasterForm.WHOLE},  # a step has written all values
    MasterForm.WHOLE: set(),  # for good: the optimizer steps by itself
}


@dataclass(slots=True)
class SubGroup:
    """The elements that the optimizer sees as one parameter.

    Attributes:
        name: Unique; part of its keys.
        numel: Elements on this rank.
        states: Dtype of each state in the store, in the optimizer's order.
        fills: Values that have not been written yet, with the value of every element. The name None
            is that of the master weights' low halves.
        members: With halves: its parameters.
        flag_state: The state whose signs are flags; empty if the weights never were in halves.
        form: Form of the master weights.
    """

    name: str
    numel: int
    states: dict[str, torch.dtype] = field(default_factory=dict)
    fills: dict[str | None, float] = field(default_factory=dict)
    members: Sequence[Member] = ()
    flag_state: str = ""
    form: MasterForm = MasterForm.WHOLE

    def key(self, state: str | None = None) -> str:
        """Return the store's name for the master weights or their low halves, or for a state."""
        if state:
            return f"state.{self.name}.{state}"
        return self.low_key if self.is_split else f"master.{self.name}"

    @property
    def low_key(self) -> str:
        """The store's name for low halves."""
        return f"low.{self.name}"

    @property
    def high_key(self) -> str:
        """The store's name for exact high halves."""
        return f"high.{self.name}"

    @property
    def all_keys(self) -> list[str]:
        """All keys in the store that a step writes, besides those of its members."""
        return [self.key(), *map(self.key, self.states)]

    @property
    def is_split(self) -> bool:
        """Whether master weights are in halves."""
        return self.form is not MasterForm.WHOLE

    def become(self, form: MasterForm) -> None:
        """Change the form to one that may follow."""
        if form not in _FOLLOWING[self.form]:
            raise AssertionError(f"{self.name} is {self.form.name} and cannot become {form.name}")
        self.form = form

    def note_stepped(self) -> None:
        """Note that a step has written all values."""
        self.fills.clear()
        if self.form is MasterForm.EXACT:
            self.become(MasterForm.ROUNDED)

    def high_runs(self, begin: int, numel: int) -> Iterator[Run]:
        """Yield the runs of the high halves of a range."""
        if self.form is MasterForm.EXACT:
            yield self.high_key, 2 * begin, numel, 0
            return
        for member in self.members:
            first, count = member.overlap(begin, numel)
            if count > 0:
                assert member.key is not None
                yield member.key, 2 * (first - member.offset), count, first - begin
