"""Loads a checkpoint of another number of ranks, or of other sub-groups, by parameter name.

DeepSpeed saves the parameters of each sub-group with the weights. So every rank can find the file
and position of each of its elements, and reads only those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memascend.checkpoint.layout import (
    Division,
    NamedParameter,
    SavedRun,
    SubGroups,
    flat,
    runs,
    sub_group_numel,
)
from memascend.checkpoint.pieces import ByteSpan, PieceReader
from memascend.checkpoint.source import (
    CheckpointSource,
    LoadedTensor,
    RankFiles,
    TargetOptimizer,
    open_source,
    read_torch_file,
)
from memascend.errors import CheckpointError

_Tensors = Mapping[tuple[int, str | None], LoadedTensor]


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """The division of a checkpoint into sub-groups and ranks when it was saved."""

    parameters: SubGroups  # parameters of each sub-group
    ranks: Sequence[RankFiles]  # each rank's part

    @property
    def world(self) -> int:
        """Number of ranks that saved it."""
        return len(self.ranks)


def read_parameters(path: Path) -> SubGroups | None:
    """Return the parameters of each sub-group from a model_states.pt; None if it lacks them.

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


def open_divided(
    saved: SavedLayout, target: TargetOptimizer, *, rank: int, world: int
) -> CheckpointSource:
    """Find a rank's part of an optimizer in the files of all ranks that saved the checkpoint.

    Raises:
        CheckpointError: The checkpoint is of another model or optimizer, incomplete, or has states
            that cannot be divided.
    """
    own = saved.ranks[rank % saved.world]
    _check_model(own.folder, saved.parameters, target.parameters)
    division = Division(saved.parameters, saved.world)
    wanted = [
        [piece for run in runs(parameters, rank=rank, world=world) for piece in division.find(run)]
        for parameters in target.parameters
    ]
    as_saved = TargetOptimizer(
        names=[_name(parameters, target.ids) for parameters in saved.parameters],
        numels=[sub_group_numel(parameters, saved.world) for parameters in saved.parameters],
        group_count=target.group_count,
        kind=target.kind,
        master_dtype=target.master_dtype,
    )
    # The own rank's source also provides the values that are equal on all ranks.
    needed = {own.rank, *(piece.rank for pieces in wanted for piece in pieces)}
    sources = {number: open_source(saved.ranks[number], as_saved) for number in sorted(needed)}
    tensors = {
        number: {(tensor.sub_group, tensor.state): tensor for tensor in source.tensors}
        for number, source in sources.items()
    }
    common = sources[own.rank]
    groups = target.regroup(common.optimizer_states["param_groups"])
    source = CheckpointSource(
        common.zero_states, {"param_groups": groups, "state": {}}, [], powers=common.powers
    )
    for index, parameters in enumerate(target.parameters):
        origins = list(dict.fromkeys(division.sub_group_of(p.name) for p in parameters))
        states = _states(own.folder, tensors[own.rank], origins)
        readers = {
            state: (dtype, _reader(wanted[index], tensors, state, dtype))
            for state, dtype in states.items()
        }
        source.add(index, readers, _scalars(own.folder, common, origins))
    return source


def _reader(
    pieces: Sequence[SavedRun],
    tensors: Mapping[int, _Tensors],
    state: str | None,
    dtype: torch.dtype,
) -> PieceReader:
    spans = [
        ByteSpan(
            target=piece.target * dtype.itemsize,
            nbytes=piece.numel * dtype.itemsize,
            reader=tensors[piece.rank][piece.sub_group, state].reader,
            source=piece.source * dtype.itemsize,
        )
        for piece in pieces
    ]
    return PieceReader(spans)


def _states(
    folder: Path, tensors: _Tensors, origins: Sequence[int]
) -> dict[str | None, torch.dtype]:
    """Return the states of a sub-group made from saved ones, which must have the same states."""
    found: list[dict[str | None, torch.dtype]] = [
        {state: tensor.dtype for (index, state), tensor in tensors.items() if index == origin}
        for origin in origins
    ]
    if any(states != found[0] for states in found):
        raise _cannot_divide(folder, f"sub-groups with states {found[:4]}")
    return found[0]


def _scalars(folder: Path, source: CheckpointSource, origins: Sequence[int]) -> dict[str, Any]:
    """Return the state that saved sub-groups share for all their elements: a step count, say."""
    states = source.optimizer_states["state"]
    found = []
    for origin in origins:
        scalars = {
            name: value
            for name, value in states.get(origin, {}).items()
            if not isinstance(value, torch.Tensor) or value.numel() > 0
        }
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                raise _cannot_divide(folder, f"{name!r} of shape {tuple(value.shape)}")
        found.append(scalars)
    if any(scalars != found[0] for scalars in found):
        raise _cannot_divide(folder, f"sub-groups with {found[:4]}")
    return found[0]


def _name(parameters: Sequence[NamedParameter], ids: Mapping[str, int]) -> str:
    """Return DeepSpeed's name of a sub-group, from the present ids of its parameters."""
    return f"{ids[parameters[0].name]}_{ids[parameters[-1].name]}"


def _check_model(folder: Path, saved: SubGroups, wanted: SubGroups) -> None:
    has, wants = ({p.name: p.numel for p in flat(groups)} for groups in (saved, wanted))
    if has == wants:
        return
    differences = {
        "missing in the checkpoint": wants.keys() - has.keys(),
        "missing in the model": has.keys() - wants.keys(),
        "of another size": {n for n in has.keys() & wants.keys() if has[n] != wants[n]},
    }
    parts = [f"{w}: {', '.join(sorted(names)[:4])}" for w, names in differences.items() if names]
    raise CheckpointError(
        f"checkpoint {folder} has other parameters than the model. {'; '.join(parts)}. "
        "Likely cause: it was saved with another model, or other parameters required gradients. "
        "Load it with the model that saved it"
    )


def _cannot_divide(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} has {what}, which cannot be divided anew. Likely cause: an "
        "optimizer that does not work element by element. Load it with the number of ranks and "
        "the sub_group_size that saved it"
    )
