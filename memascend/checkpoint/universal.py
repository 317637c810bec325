"""A universal checkpoint, as `ds_to_universal.py` makes it: a folder for each parameter.

Any number of ranks can load it. Each file has one whole tensor, which is mapped; a rank reads its
own part of it. There is no manifest: shapes are compared, and the checksums that torch writes into
its files.
"""

from __future__ import annotations

import functools
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from memascend.base.progress import Advance
from memascend.checkpoint.files import PIECE_BYTES, Reader, TensorReader, drop_cache
from memascend.checkpoint.layout import NamedParameter, flat, runs
from memascend.checkpoint.manifest import missing_file
from memascend.checkpoint.pieces import ByteSpan, PieceReader
from memascend.checkpoint.source import CheckpointSource, TargetOptimizer, read_torch_file
from memascend.errors import CheckpointError
from memascend.plan.optimizers import MOMENTUM

_MASTER = "fp32"
_STEP = "step"
#: Exceptions of zipfile for damage: a flipped bit may look like a password, a method or an offset.
_DAMAGE = (zipfile.BadZipFile, EOFError, RuntimeError, OSError, ValueError, zlib.error)


def universal_files(folder: Path, target: TargetOptimizer) -> list[Path]:
    """Return the files of all tensors of an optimizer.

    Raises:
        CheckpointError: The folder is not a universal checkpoint, or a file is missing.
    """
    if not (folder / "zero").is_dir():
        raise CheckpointError(
            f"{folder} is no universal checkpoint: it has no folder zero. Likely cause: "
            '"checkpoint": {"load_universal": true} is set for an ordinary checkpoint. Convert it '
            "with ds_to_universal.py, or remove the key: memascend loads ordinary checkpoints with "
            "any number of ranks"
        )
    found: list[Path] = []
    for parameter in flat(target.parameters):
        master = _file(folder, parameter.name, _MASTER)
        if not master.is_file():
            raise missing_file(master)
        found += sorted(path for path in master.parent.glob("*.pt") if path.stem != _STEP)
    return found


def verify_universal(paths: list[Path], advance: Advance) -> None:
    """Read each file once; raise CheckpointError if it differs from the checksums in it."""
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


def open_universal(
    folder: Path, target: TargetOptimizer, *, rank: int, world: int
) -> CheckpointSource:
    """Find a rank's part of every tensor of an optimizer.

    Raises:
        CheckpointError: The checkpoint is of another model or configuration, or incomplete.
    """
    path = folder / "zero" / "optimizer_state.pt"
    zero_states = read_torch_file(path)
    try:
        saved = zero_states["optimizer_state_dict"]
        groups, first = saved["param_groups"], saved["state"][0]
        # With Muon some sub-groups have none.
        counted = (
            values for values in saved["state"].values() if any(map(is_scalar, values.values()))
        )
        scalars = {name: value for name, value in next(counted, first).items() if is_scalar(value)}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint file {path} lacks {error}. Likely cause: it was converted from another "
            "ZeRO stage, or before the first step. Convert a checkpoint of ZeRO stage 3"
        ) from error
    if len(groups) != target.group_count:
        raise CheckpointError(
            f"checkpoint file {path} has {len(groups)} parameter groups, the optimizer has "
            f"{target.group_count}. Likely cause: it was saved with other groups of parameters. "
            "Load it with the groups that saved it"
        )
    optimizer_states = {"param_groups": target.regroup(groups), "state": {}}
    source = CheckpointSource(zero_states, optimizer_states, [])
    for index, parameters in enumerate(target.parameters):
        own_runs = list(runs(parameters, rank=rank, world=world))
        readers: dict[str | None, tuple[torch.dtype, Reader]] = {}
        for state in _states(folder, parameters):
            dtypes = {_check_numel(_file(folder, p.name, state), p) for p in parameters}
            dtype = _only(folder, state, dtypes, target)
            spans = [
                ByteSpan(
                    target=run.offset * dtype.itemsize,
                    nbytes=run.numel * dtype.itemsize,
                    reader=parameter_reader(_file(folder, run.name, state)),
                    source=run.first * dtype.itemsize,
                )
                for run in own_runs
            ]
            readers[None if state == _MASTER else state] = dtype, PieceReader(spans)
        source.add(index, readers, {} if set(readers) == {None, MOMENTUM} else scalars)
    return source


def parameter_reader(path: Path) -> TensorReader:
    """Return a reader of a parameter's file, which maps it at the first read."""
    return TensorReader(functools.partial(_content, path), is_mapped=True)


def _file(folder: Path, parameter: str, state: str) -> Path:
    return folder / "zero" / parameter / f"{state}.pt"


def _states(folder: Path, parameters: Sequence[NamedParameter]) -> list[str]:
    """Return the states of a sub-group's parameters, which must be equal; master weights first."""
    found = [
        {path.stem for path in (folder / "zero" / p.name).glob("*.pt")} - {_STEP}
        for p in parameters
    ]
    for parameter, states in zip(parameters, found, strict=True):
        lacking = set.union(*found) - states
        if lacking:
            raise missing_file(_file(folder, parameter.name, min(lacking)))
    return [_MASTER, *sorted(found[0] - {_MASTER})]


def _check_numel(path: Path, parameter: NamedParameter) -> torch.dtype:
    """Check that a file has the parameter's number of elements; return its dtype."""
    tensor = _content(path)
    if tensor.numel() != parameter.numel:
        raise CheckpointError(
            f"checkpoint file {path} has {tensor.numel()} elements, the model's {parameter.name} "
            f"has {parameter.numel}. Likely cause: it was saved with another model. Load it with "
            "the model that saved it"
        )
    return tensor.dtype


def _content(path: Path) -> torch.Tensor:
    """Return the tensor of a file, mapped; upstream wraps it in a dictionary for some models."""
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
    """Return whether a value of an optimizer's state is one for all elements, as a step count."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _only(
    folder: Path, state: str, dtypes: set[torch.dtype], target: TargetOptimizer
) -> torch.dtype:
    if state == _MASTER and dtypes != {target.master_dtype}:
        found = ", ".join(sorted(map(str, dtypes)))
        raise CheckpointError(
            f"checkpoint {folder} has master weights in {found}, the optimizer in "
            f"{target.master_dtype}. Likely cause: it was saved with another optimizer. Load it "
            "with the configuration that saved it"
        )
    if len(dtypes) > 1:
        raise CheckpointError(
            f"checkpoint {folder} has {state} in several dtypes: {sorted(map(str, dtypes))}. "
            "Likely cause: files of several checkpoints in one folder. Convert it again"
        )
    return dtypes.pop()
