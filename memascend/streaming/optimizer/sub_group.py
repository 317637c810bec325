"""The record of one sub-group: its size, its keys in the store, and the form of its master weights.

Knows torch's dtypes and names; neither the store nor tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

from memascend.kernels.codes import scale_count
from memascend.kernels.halves import clear_flags, flag_bytes
from memascend.streaming.optimizer.codes import CodeKeys
from memascend.streaming.optimizer.halves import HalfKeys, Run
from memascend.streaming.optimizer.low_bits import LowBits

#: Optimizer state of one parameter: tensors shaped as the parameter, and scalars.
State = MutableMapping[str, Any]
#: Name of the scales of all states in codes (`kernels.codes`), side by side in one key.
SCALES = "scales"
#: Name of flags that are bits (`LowBits.BITS`).
FLAGS = "flags"


def is_code(dtype: torch.dtype | None) -> bool:
    """Return whether this is the dtype of codes, which need scales."""
    return dtype in (torch.int8, torch.uint8)


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
    #: The members' own values, and the low bits that these lack. Signs of `flag_state` are flags.
    ROUNDED = auto()
    #: High halves of their own, and low bits: the members' values may differ. Signs of `flag_state`
    #: have no meaning.
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
        states: Dtype of each state in the store, in the optimizer's order; of codes, if it is an
            8-bit one.
        apart: Names of states that tiles do not have: they are read and written by themselves.
        coded: States in codes, in the order of their scales; empty until these are there.
        fills: Values that have not been written yet, with the value of every element. The name None
            is that of the master weights' low bits.
        members: With low bits: its parameters.
        flag_state: The state whose signs are flags, or FLAGS; empty if there are no flags.
        form: Form of the master weights.
        low_bits: Form of their part that is stored beside the members.
    """

    name: str
    numel: int
    states: dict[str, torch.dtype] = field(default_factory=dict)
    coded: Sequence[str] = ()
    fills: dict[str | None, float] = field(default_factory=dict)
    members: Sequence[Member] = ()
    flag_state: str = ""
    form: MasterForm = MasterForm.WHOLE
    low_bits: LowBits = LowBits.FLAGGED
    apart: frozenset[str] = frozenset()

    @property
    def tile_states(self) -> dict[str, torch.dtype]:
        """Dtype of each state that a tile has a part of, in the optimizer's order."""
        return {name: dtype for name, dtype in self.states.items() if name not in self.apart}

    @property
    def steps_updates(self) -> bool:
        """Whether its gradients are updates by now, made with states that tiles do not have."""
        return any(name in self.apart for name in self.states)

    @property
    def tile_scales(self) -> bool:
        """Whether a tile has scales: of its own states in codes, not of those beside tiles."""
        return bool(self.coded) and not self.steps_updates

    @property
    def has_bits(self) -> bool:
        """Whether a step writes flags as bits."""
        return self.is_split and self.low_bits is LowBits.BITS

    def key(self, state: str | None = None) -> str:
        """Return the store's name for the master weights or their low bits, or for a state."""
        if state:
            return f"state.{self.name}.{state}"
        return self.low_key if self.is_split else f"master.{self.name}"

    @property
    def low_key(self) -> str:
        """The store's name for low bits."""
        return f"low.{self.name}"

    @property
    def high_key(self) -> str:
        """The store's name for high halves beside the members."""
        return f"high.{self.name}"

    @property
    def all_keys(self) -> list[str]:
        """All keys in the store that a walk writes, besides those of its members."""
        names = [*self.state_names, *[FLAGS] * self.has_bits]
        return [self.key(), *(self.key(name) for name in names if name not in self.apart)]

    @property
    def state_names(self) -> list[str]:
        """The states, and the scales of those in codes."""
        return [*self.states, *[SCALES][: len(self.coded)]]

    @property
    def is_split(self) -> bool:
        """Whether master weights are low bits beside high halves."""
        return self.form is not MasterForm.WHOLE

    @property
    def read_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which each state is read: fp32 of codes."""
        return {
            name: torch.float32 if is_code(dtype) else dtype for name, dtype in self.states.items()
        }

    def is_coded(self, state: str) -> bool:
        """Return whether a state is in codes."""
        return is_code(self.states.get(state))

    def stored_numel(self, state: str | None) -> int:
        """Return the elements of a key."""
        if state == FLAGS:
            return flag_bytes(self.numel)
        return scale_count(self.numel) * len(self.coded) if state == SCALES else self.numel

    def code_keys(self, state: str) -> CodeKeys:
        """Return the keys of a state in codes."""
        return CodeKeys(
            codes=self.key(state),
            dtype=self.states[state],
            scales=self.key(SCALES),
            number=self.coded.index(state),
            kinds=len(self.coded),
            numel=self.numel,
        )

    def half_keys(self) -> HalfKeys:
        """Return the keys of master weights that are split."""
        has_flags = (
            self.form is MasterForm.ROUNDED
            and (self.flag_state in self.states or self.has_bits)
            and self.flag_state not in self.fills
        )
        return HalfKeys(
            low_bits=self.low_bits,
            low=None if None in self.fills else self.key(),
            high=self.high_runs,
            flags=self.key(self.flag_state) if has_flags else None,
            flag_dtype=torch.uint8
            if self.has_bits
            else self.states.get(self.flag_state, torch.float32),
        )

    def become(self, form: MasterForm) -> None:
        """Change the form to one that may follow."""
        if form not in _FOLLOWING[self.form]:
            raise AssertionError(f"{self.name} is {self.form.name} and cannot become {form.name}")
        self.form = form

    def note_stepped(self) -> None:
        """Note that a step has written all values."""
        self.fills = {name: fill for name, fill in self.fills.items() if name in self.apart}
        if self.form is MasterForm.EXACT:
            self.become(MasterForm.ROUNDED)

    def high_runs(self, begin: int, numel: int) -> Iterator[Run]:
        """Yield the runs of the high halves of a range."""
        if self.form is MasterForm.EXACT:
            yield self.high_key, 2 * begin, numel, 0
        else:
            yield from self.member_runs(begin, numel)

    def member_runs(self, begin: int, numel: int) -> Iterator[Run]:
        """Yield the runs of the members' values in a range."""
        for member in self.members:
            first, count = member.overlap(begin, numel)
            if count > 0:
                assert member.key is not None
                yield member.key, 2 * (first - member.offset), count, first - begin


def check_sign(group: SubGroup, state: str, values: torch.Tensor) -> None:
    """Refuse values below zero.

    Raises:
        ValueError: There are such values.
    """
    if bool((values < 0).any()):
        raise ValueError(
            f"{state} of sub-group {group.name} would be {values.min().item()}. likely "
            "cause: values of another state, or a damaged file; a second moment is a mean of "
            "squares. fix: give values that are not negative"
        )


def without_signs(
    group: SubGroup, state: str, dtype: torch.dtype, source: Callable[[int, torch.Tensor], None]
) -> Callable[[int, torch.Tensor], None]:
    """Return a source whose values have no sign; those of `source`, -0.0 and NaN, may have one."""

    def fill(offset: int, target: torch.Tensor) -> None:
        source(offset, target)
        check_sign(group, state, target.view(dtype))
        clear_flags(target.view(dtype))

    return fill
