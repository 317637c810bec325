"""How ZeRO-3 lays out the elements of each parameter: arithmetic, without torch and DeepSpeed.

Every parameter is flattened and cut into one run per rank, all of the same length, the last ones
padded. A sub-group on a rank is the concatenation of these runs of its parameters. So an element
can be found by its parameter's name in any division of the same model into sub-groups and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter in a checkpoint: its name, and the elements of the whole tensor."""

    name: str
    numel: int


#: The parameters of each sub-group, in order.
SubGroups = Sequence[Sequence[NamedParameter]]


@dataclass(frozen=True, slots=True)
class ParameterRun:
    """Elements that are contiguous in a sub-group and in one parameter."""

    name: str
    first: int  # first element in the whole parameter
    offset: int  # first element in the sub-group
    numel: int  # elements, without padding


@dataclass(frozen=True, slots=True)
class SavedRun:
    """Elements that are contiguous in a saved sub-group and in a wanted one."""

    rank: int  # the rank that saved them
    sub_group: int  # index of the saved sub-group
    source: int  # first element in the saved sub-group
    target: int  # first element in the wanted one
    numel: int


def flat(sub_groups: SubGroups) -> Iterator[NamedParameter]:
    """Yield every parameter, in order."""
    for parameters in sub_groups:
        yield from parameters


def share_numel(numel: int, world: int) -> int:
    """Return the elements of a parameter on each rank, padding included."""
    return -(-numel // world)


def sub_group_numel(parameters: Sequence[NamedParameter], world: int) -> int:
    """Return the elements of a sub-group on each rank, padding included."""
    return sum(share_numel(parameter.numel, world) for parameter in parameters)


def runs(parameters: Sequence[NamedParameter], *, rank: int, world: int) -> Iterator[ParameterRun]:
    """Yield the runs of a sub-group on a rank, without padding."""
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
    """The division of a model into sub-groups and ranks, looked up by parameter name."""

    def __init__(self, sub_groups: SubGroups, world: int) -> None:
        #: By name: sub-group, offset of the parameter's run in it, padded length of the run.
        self._runs = {
            parameter.name: (index, offset, share)
            for index, parameters in enumerate(sub_groups)
            for parameter, offset, share in _shares(parameters, world)
        }

    def sub_group_of(self, name: str) -> int:
        """Return the index of a parameter's sub-group."""
        return self._runs[name][0]

    def find(self, run: ParameterRun) -> Iterator[SavedRun]:
        """Yield the locations in this division of a run of another one, in order."""
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
