"""A checkpoint of another number of ranks, or of other sub-groups, put together anew by name.

What DeepSpeed writes beside the weights says which parameters each saved sub-group held. So every
rank knows where in whose files the elements lie that are its own now, and reads no others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memascend.checkpoint.layout import (
    Division,
    NamedParameter,
    Piece,
    SubGroups,
    flat,
    runs,
    sub_group_numel,
)
from memascend.checkpoint.manifest import Manifest
from memascend.checkpoint.pieces import PieceReader, Segment
from memascend.checkpoint.source import (
    CheckpointSource,
    LoadedTensor,
    Place,
    Wanted,
    open_source,
    read_torch_file,
)
from memascend.errors import CheckpointError

_Tensors = Mapping[tuple[int, str | None], LoadedTensor]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint as it was divided when it was saved.

    Attributes:
        parameters: Those of each sub-group.
        world: How many ranks saved it.
        place_of: Where the part of a rank lies.
        manifest_of: The manifest of a rank; None where it was saved without memascend.
    """

    parameters: SubGroups
    world: int
    place_of: Callable[[int], Place]
    manifest_of: Callable[[int], Manifest | None]


def read_parameters(path: Path) -> SubGroups | None:
    """Which parameters each sub-group had, out of a model_states.pt; None where it does not say.

    Raises:
        CheckpointError: The file is missing or cannot be read.
    """
    content = read_torch_file(path)
    shapes = content.get("param_shapes") if isinstance(content, dict) else None
    if not shapes:
        return None
    return tuple(
        tuple(NamedParameter(name, torch.Size(shape).numel()) for name, shape in group.items())
        for group in shapes
    )


def is_same_model(saved: SubGroups, wanted: SubGroups) -> bool:
    """Whether both have the same parameters, however they are divided."""
    return set(flat(saved)) == set(flat(wanted))


def open_divided(saved: Saved, wanted: Wanted, *, rank: int, world: int) -> CheckpointSource:
    """Finds what an optimizer wants in the files of all ranks that saved.

    Args:
        saved: The checkpoint.
        wanted: The optimizer.
        rank: Whose part is wanted.
        world: How many ranks there are now.

    Raises:
        CheckpointError: It is that of another model or optimizer, incomplete, or has states that
            cannot be divided.
    """
    place = saved.place_of(rank % saved.world)
    _check_model(place, saved.parameters, wanted.parameters)
    division = Division(saved.parameters, saved.world)
    pieces = [
        [piece for run in runs(parameters, rank=rank, world=world) for piece in division.find(run)]
        for parameters in wanted.parameters
    ]
    as_saved = Wanted(
        names=[_name(parameters, wanted.ids) for parameters in saved.parameters],
        numels=[sub_group_numel(parameters, saved.world) for parameters in saved.parameters],
        group_count=wanted.group_count,
        kind=wanted.kind,
        master_dtype=wanted.master_dtype,
    )
    # This one stands for what is the same on every rank.
    needed = {place.rank, *(piece.rank for group in pieces for piece in group)}
    sources = {
        number: open_source(saved.place_of(number), saved.manifest_of(number), as_saved)
        for number in sorted(needed)
    }
    tensors = {
        number: {(tensor.sub_group, tensor.state): tensor for tensor in source.tensors}
        for number, source in sources.items()
    }
    common = sources[place.rank]
    source = CheckpointSource(
        zero_states=common.zero_states,
        optimizer_states={"param_groups": _groups(common, wanted), "state": {}},
        tensors=[],
    )
    for index, parameters in enumerate(wanted.parameters):
        origins = list(dict.fromkeys(division.sub_group_of(p.name) for p in parameters))
        states = _states(place, tensors[place.rank], origins)
        for state, dtype in states.items():
            reader = PieceReader(list(_segments(pieces[index], tensors, state, dtype)))
            source.tensors.append(LoadedTensor(index, state, dtype, reader))
        scalars = _scalars(place, common, origins)
        if scalars or len(states) > 1:
            empty = {s: torch.empty(0, dtype=d) for s, d in states.items() if s is not None}
            # A count that is a tensor would be counted up once for each sub-group that shares it.
            source.optimizer_states["state"][index] = copy.deepcopy(scalars) | empty
    return source


def _segments(
    pieces: Sequence[Piece], tensors: Mapping[int, _Tensors], state: str | None, dtype: torch.dtype
) -> Iterator[Segment]:
    for piece in pieces:
        yield Segment(
            target=piece.target * dtype.itemsize,
            nbytes=piece.numel * dtype.itemsize,
            reader=tensors[piece.rank][piece.sub_group, state].reader,
            source=piece.source * dtype.itemsize,
        )


def _states(
    place: Place, tensors: _Tensors, origins: Sequence[int]
) -> dict[str | None, torch.dtype]:
    """The states of a sub-group that is made of several; they have to have the same."""
    found: list[dict[str | None, torch.dtype]] = [
        {state: tensor.dtype for (index, state), tensor in tensors.items() if index == origin}
        for origin in origins
    ]
    if any(states != found[0] for states in found):
        raise _cannot_divide(place, f"sub-groups with states {found[:4]}")
    return found[0]


def _scalars(place: Place, source: CheckpointSource, origins: Sequence[int]) -> dict[str, Any]:
    """What the optimizer knows of a sub-group beside tensors: its count of steps."""
    states = source.optimizer_states["state"]
    found = []
    for origin in origins:
        values = states.get(origin, {})
        scalars = {name: value for name, value in values.items() if _has_elements(value)}
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                raise _cannot_divide(place, f"{name!r} of shape {tuple(value.shape)}")
        found.append(scalars)
    if any(scalars != found[0] for scalars in found):
        raise _cannot_divide(place, f"sub-groups with {found[:4]}")
    return found[0]


def _has_elements(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() > 0


def _groups(source: CheckpointSource, wanted: Wanted) -> list[dict[str, Any]]:
    """The parameter groups with their settings, as lists of the sub-groups there are now."""
    return [
        group | {"params": [index for index, own in enumerate(wanted.groups) if own == number]}
        for number, group in enumerate(source.optimizer_states["param_groups"])
    ]


def _name(parameters: Sequence[NamedParameter], ids: Mapping[str, int]) -> str:
    """DeepSpeed's name of a sub-group, by the numbers that its parameters have now."""
    return f"{ids[parameters[0].name]}_{ids[parameters[-1].name]}"


def _check_model(place: Place, saved: SubGroups, wanted: SubGroups) -> None:
    has, wants = ({p.name: p.numel for p in flat(groups)} for groups in (saved, wanted))
    if has == wants:
        return
    missing = sorted(wants.keys() - has.keys())
    surplus = sorted(has.keys() - wants.keys())
    others = sorted(name for name in has.keys() & wants.keys() if has[name] != wants[name])
    parts = [
        f"{what}: {', '.join(names[:4])}"
        for what, names in (
            ("missing in the checkpoint", missing),
            ("missing in the model", surplus),
            ("of another size", others),
        )
        if names
    ]
    raise CheckpointError(
        f"checkpoint {place.folder} has other parameters than the model. {'; '.join(parts)}. "
        "Likely cause: it was saved with another model, or other parameters required gradients. "
        "Load it with the model that saved it"
    )


def _cannot_divide(place: Place, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {place.folder} has {what}, which cannot be divided anew. Likely cause: an "
        "optimizer that does not work element by element. Load it with the number of ranks and "
        "the sub_group_size that saved it"
    )
