"""A universal checkpoint, as `ds_to_universal.py` makes it: a folder for each parameter.

Any number of ranks reads it. Each file holds one whole tensor, which is mapped; a rank reads its
own part of it. There is no manifest: what is compared are shapes, and the checksums that torch
itself puts into its files.
"""

from __future__ import annotations

import copy
import functools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from memascend.checkpoint.files import PIECE_BYTES, Advance, TensorReader, drop_cache
from memascend.checkpoint.layout import NamedParameter, Run, runs
from memascend.checkpoint.manifest import missing_file
from memascend.checkpoint.pieces import LazyReader, PieceReader, Segment
from memascend.checkpoint.source import CheckpointSource, LoadedTensor, Wanted, read_torch_file
from memascend.errors import CheckpointError

_MASTER = "fp32"
_STEP = "step"
#: What zipfile raises: of a turned bit it also says that it is a password, a method, or a place.
_DAMAGE = (zipfile.BadZipFile, EOFError, RuntimeError, OSError, ValueError, zlib.error)


def universal_files(folder: Path, wanted: Wanted) -> list[Path]:
    """Every file of a tensor that an optimizer wants.

    Raises:
        CheckpointError: It is no universal checkpoint, or one is missing.
    """
    if not (folder / "zero").is_dir():
        raise CheckpointError(
            f"{folder} is no universal checkpoint: it has no folder zero. Likely cause: "
            '"checkpoint": {"load_universal": true} is set and another checkpoint is loaded. '
            "Convert it with ds_to_universal.py, or remove the key: other numbers of ranks load it "
            "as it is"
        )
    found: list[Path] = []
    for parameters in wanted.parameters:
        for parameter in parameters:
            own = folder / "zero" / parameter.name
            if not (own / f"{_MASTER}.pt").is_file():
                raise missing_file(own / f"{_MASTER}.pt")
            found += sorted(path for path in own.glob("*.pt") if path.stem != _STEP)
    return found


def verify_universal(paths: list[Path], advance: Advance) -> None:
    """Compares files with the checksums in them; reads each of them once.

    Raises:
        CheckpointError: Names the file that is damaged.
    """
    for path in paths:
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                for record in archive.infolist():
                    with archive.open(record) as content:
                        while piece := content.read(PIECE_BYTES):
                            advance(len(piece))
                drop_cache(file.fileno())
        except _DAMAGE as error:
            found = str(error) or "it ends early"
            raise CheckpointError(
                f"checkpoint file {path} is damaged: {found}. Likely cause: it was not copied "
                "completely, or the drive changed it. Copy it again, or convert again"
            ) from error


def open_universal(folder: Path, wanted: Wanted, *, rank: int, world: int) -> CheckpointSource:
    """Finds every tensor that an optimizer wants.

    Args:
        folder: That of the tag.
        wanted: The optimizer.
        rank: Whose part is wanted.
        world: How many ranks there are now.

    Raises:
        CheckpointError: It is that of another model or configuration, or incomplete.
    """
    path = folder / "zero" / "optimizer_state.pt"
    zero_states = read_torch_file(path)
    try:
        saved = zero_states["optimizer_state_dict"]
        groups, first = saved["param_groups"], saved["state"][0]
        scalars = {name: value for name, value in first.items() if is_scalar(value)}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint file {path} lacks {error}. Likely cause: it was converted from another "
            "ZeRO stage, or before the first step. Convert a checkpoint of ZeRO stage 3"
        ) from error
    if len(groups) != wanted.group_count:
        raise CheckpointError(
            f"checkpoint file {path} has {len(groups)} parameter groups, the optimizer has "
            f"{wanted.group_count}. Likely cause: it was saved with other groups of parameters. "
            "Load it with the groups that saved it"
        )
    members = [
        [index for index, own in enumerate(wanted.groups) if own == number]
        for number in range(wanted.group_count)
    ]
    numbered = [group | {"params": own} for group, own in zip(groups, members, strict=True)]
    source = CheckpointSource(zero_states, {"param_groups": numbered, "state": {}}, [])
    for index, parameters in enumerate(wanted.parameters):
        own_runs = {run.name: run for run in runs(parameters, rank=rank, world=world)}
        states = _states(folder, parameters)
        for state in states:
            dtypes: set[torch.dtype] = set()
            segments: list[Segment] = []
            for parameter in parameters:
                file = folder / "zero" / parameter.name / f"{state}.pt"
                tensor = _tensor(file, parameter)
                dtypes.add(tensor.dtype)
                segments += _segments(own_runs.get(parameter.name), file, tensor.dtype)
            dtype = _only(folder, state, dtypes, wanted)
            name = None if state == _MASTER else state
            source.tensors.append(LoadedTensor(index, name, dtype, PieceReader(segments)))
        empty = {state: torch.empty(0) for state in states if state != _MASTER}
        # A count that is a tensor would be counted up once for each sub-group that shares it.
        source.optimizer_states["state"][index] = copy.deepcopy(scalars) | empty
    return source


def _segments(run: Run | None, file: Path, dtype: torch.dtype) -> Iterator[Segment]:
    if run is not None:
        yield Segment(
            target=run.offset * dtype.itemsize,
            nbytes=run.numel * dtype.itemsize,
            reader=LazyReader(functools.partial(_open, file)),
            source=run.first * dtype.itemsize,
        )


def _states(folder: Path, parameters: tuple[NamedParameter, ...] | Any) -> list[str]:
    """The states of a sub-group's parameters, master weights first; they have to have the same."""
    found = [
        {path.stem for path in (folder / "zero" / p.name).glob("*.pt")} - {_STEP}
        for p in parameters
    ]
    for parameter, states in zip(parameters, found, strict=True):
        lacking = set.union(*found) - states
        if lacking:
            raise missing_file(folder / "zero" / parameter.name / f"{min(lacking)}.pt")
    return [_MASTER, *sorted(found[0] - {_MASTER})]


def _open(path: Path) -> TensorReader:
    return TensorReader(_content(path), is_mapped=True)


def _tensor(path: Path, parameter: NamedParameter) -> torch.Tensor:
    tensor = _content(path)
    if tensor.numel() != parameter.numel:
        raise CheckpointError(
            f"checkpoint file {path} has {tensor.numel()} elements, the model's {parameter.name} "
            f"has {parameter.numel}. Likely cause: it was saved with another model. Load it with "
            "the model that saved it"
        )
    return tensor


def _content(path: Path) -> torch.Tensor:
    """The tensor of a file, mapped; upstream wraps it in a dictionary for some models."""
    content = read_torch_file(path)
    is_expert = isinstance(content, dict) and content.get("is_expert_param", False)
    tensor = content.get("param") if isinstance(content, dict) else content
    if is_expert or not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
        raise CheckpointError(
            f"checkpoint file {path} holds no plain tensor. Likely cause: it was converted from a "
            "mixture of experts, which memascend does not load. Set offload_optimizer.device to "
            '"cpu"'
        )
    return tensor


def is_scalar(value: object) -> bool:
    """Whether a value of an optimizer's state is the same for every element: its count of steps."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _only(folder: Path, state: str, dtypes: set[torch.dtype], wanted: Wanted) -> torch.dtype:
    if state == _MASTER and dtypes != {wanted.master_dtype}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise CheckpointError(
            f"checkpoint {folder} has master weights in {found}, the optimizer in "
            f"{wanted.master_dtype}. Likely cause: it was saved with another optimizer. Load it "
            "with the configuration that saved it"
        )
    if len(dtypes) > 1:
        raise CheckpointError(
            f"checkpoint {folder} has {state} in several dtypes: {sorted(map(str, dtypes))}. "
            "Likely cause: files of several checkpoints in one folder. Convert it again"
        )
    return dtypes.pop()
