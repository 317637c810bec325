"""Every element is found again, whoever holds it and whoever wants it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from memascend.checkpoint.layout import Division, NamedParameter, runs, share_numel, sub_group_numel

Element = tuple[str, int]
PADDING: Element = ("padding", 0)
WORLD_MAX = 5


def held(parameters: Sequence[NamedParameter], rank: int, world: int) -> list[Element]:
    """What a rank has of a sub-group, element by element, as DeepSpeed lays it out."""
    elements = []
    for parameter in parameters:
        share = share_numel(parameter.numel, world)
        for number in range(rank * share, (rank + 1) * share):
            elements.append((parameter.name, number) if number < parameter.numel else PADDING)
    return elements


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[list[NamedParameter]], list[list[NamedParameter]]]:
    """One model in two orders, cut into sub-groups at two sets of places."""
    numels = draw(st.lists(st.integers(1, 40), min_size=1, max_size=7))
    model = [NamedParameter(f"p{number}", numel) for number, numel in enumerate(numels)]

    def cut(parameters: list[NamedParameter]) -> list[list[NamedParameter]]:
        groups: list[list[NamedParameter]] = [[]]
        for parameter in parameters:
            if groups[-1] and draw(st.booleans()):
                groups.append([])
            groups[-1].append(parameter)
        return groups

    return cut(model), cut(draw(st.permutations(model)))


@given(divisions(), st.integers(1, WORLD_MAX), st.integers(1, WORLD_MAX))
def test_any_division_is_put_together_from_any_other(
    both: tuple[list[list[NamedParameter]], list[list[NamedParameter]]],
    saved_world: int,
    world: int,
) -> None:
    saved, wanted = both
    division = Division(saved, saved_world)
    for rank in range(world):
        for parameters in wanted:
            found = [PADDING] * sub_group_numel(parameters, world)
            for run in runs(parameters, rank=rank, world=world):
                for piece in division.find(run):
                    source = held(saved[piece.sub_group], piece.rank, saved_world)
                    taken = source[piece.source : piece.source + piece.numel]
                    found[piece.target : piece.target + piece.numel] = taken
            assert found == held(parameters, rank, world)


def test_a_sub_group_is_found_by_a_parameter() -> None:
    division = Division([[NamedParameter("a", 3)], [NamedParameter("b", 1)]], world=2)
    assert [division.sub_group_of(name) for name in ("a", "b")] == [0, 1]
