"""Where ZeRO-3 leaves the elements of each parameter: pure arithmetic, neither torch nor DeepSpeed.

Every parameter is flattened and cut into as many runs of equal length as there are ranks, the last
ones padded. A sub-group on a rank is those runs of its parameters, one behind the other. So an
element is found by the parameter's name in any division of the same model, into whichever
sub-groups and between however many ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter as a checkpoint knows it: name, and elements of the whole tensor."""

    name: str
    numel: int


#: The parameters of each sub-group, in order.
SubGroups = Sequence[Sequence[NamedParameter]]


@dataclass(frozen=True, slots=True)
class ParameterRun:
    """Elements that lie together in a sub-group, and in one parameter.

    Attributes:
        name: The parameter.
        first: First element, counted in the whole parameter.
        offset: First element, counted in the sub-group.
        numel: Elements, without padding.
    """

    name: str
    first: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class SavedRun:
    """Elements that lie together in a saved sub-group and in a wanted one.

    Attributes:
        rank: That saved them.
        sub_group: Index of the saved one.
        source: First element there.
        target: First element in the wanted one.
        numel: Elements.
    """

    rank: int
    sub_group: int
    source: int
    target: int
    numel: int


def flat(sub_groups: SubGroups) -> Iterator[NamedParameter]:
    """Yield every parameter, in order."""
    for parameters in sub_groups:
        yield from parameters


def share_numel(numel: int, world: int) -> int:
    """Count the elements of a parameter on each rank, padding included."""
    return -(-numel // world)


def sub_group_numel(parameters: Sequence[NamedParameter], world: int) -> int:
    """Count the elements of a sub-group on each rank, padding included."""
    return sum(share_numel(parameter.numel, world) for parameter in parameters)


def runs(parameters: Sequence[NamedParameter], *, rank: int, world: int) -> Iterator[ParameterRun]:
    """Yield what a sub-group holds on a rank; where it holds padding there is no run."""
    for parameter, offset, share in _shares(parameters, world):
        first = rank * share
        numel = min(share, parameter.numel - first)
        if numel > 0:
            yield ParameterRun(parameter.name, first, offset, numel)


def _shares(
    parameters: Sequence[NamedParameter], world: int
) -> Iterator[tuple[NamedParameter, int, int]]:
    """Yield each parameter, the offset of its run in the sub-group, and its padded length."""
    offset = 0
    for parameter in parameters:
        share = share_numel(parameter.numel, world)
        yield parameter, offset, share
        offset += share


class Division:
    """How a model is divided into sub-groups and between ranks, looked up by name."""

    def __init__(self, sub_groups: SubGroups, world: int) -> None:
        """Find every parameter once."""
        #: By name: its sub-group, the offset of its run there, the elements of that with padding.
        self._runs = {
            parameter.name: (index, offset, share)
            for index, parameters in enumerate(sub_groups)
            for parameter, offset, share in _shares(parameters, world)
        }

    def sub_group_of(self, name: str) -> int:
        """Return the index of the sub-group that a parameter is in."""
        return self._runs[name][0]

    def find(self, run: ParameterRun) -> Iterator[SavedRun]:
        """Yield where the elements of a run of another division lie in this one, in order."""
        sub_group, offset, share = self._runs[run.name]
        begin, end = run.first, run.first + run.numel
        while begin < end:
            rank = begin // share
            until = min(end, (rank + 1) * share)
            yield SavedRun(
                rank=rank,
                sub_group=sub_group,
                source=offset + begin - rank * share,
                target=run.offset + begin - run.first,
                numel=until - begin,
            )
            begin = until
