"""Converts a checkpoint into a universal one, tensor by tensor.

The result equals that of `ds_to_universal.py`, which reads a whole rank's part into memory. Here
tensors pass from file to file through one buffer. The files are upstream's:
`zero/<parameter>/fp32.pt` and one per state, `zero/optimizer_state.pt`, and copies of the
model_states.pt. States in bf16 are widened to the master weights' dtype, so that any run can load
them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memascend.base.progress import byte_progress
from memascend.checkpoint.converted import converted
from memascend.checkpoint.divided import SavedLayout, open_divided, read_parameters
from memascend.checkpoint.files import PIECE_BYTES, Reader, SummedFile
from memascend.checkpoint.folder import check_space, write_latest
from memascend.checkpoint.layout import flat
from memascend.checkpoint.manifest import Manifest, check_name, missing_file, read_manifest
from memascend.checkpoint.source import (
    CheckpointSource,
    RankFiles,
    TargetOptimizer,
    check_folder,
    read_zero_states,
    verify,
)
from memascend.checkpoint.torch_file import StreamedTensor, Write, save_streamed
from memascend.checkpoint.universal import is_scalar
from memascend.errors import CheckpointError
from memascend.system.files import sync

_STATES = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


def write_universal(folder: Path, output: Path) -> int:
    """Verify and convert a checkpoint, which is not changed; return the number of parameters.

    `output` is the folder to create; `latest_universal` beside it then names it.

    Raises:
        CheckpointError: The checkpoint is damaged, incomplete, or cannot be divided; or `output`
            exists.
    """
    check_folder(folder)
    if output.exists():
        raise CheckpointError(
            f"cannot convert into {output}: it exists already. Remove it, or name another folder"
        )
    states = _find_states(folder)
    saved, target = _survey(folder, states)
    entries = [entry for part in saved.ranks if part.manifest for entry in part.manifest.files]
    nbytes = sum(entry.nbytes for entry in entries)
    with byte_progress(f"verifying checkpoint {folder}", nbytes, leads=True) as advance:
        verify(folder, entries, advance)
    source = _widened(open_divided(saved, target, rank=0, world=1), target)
    working = output.with_name(f".memascend-{output.name}.converting")
    shutil.rmtree(working, ignore_errors=True)
    try:
        parent = next(path for path in output.parents if path.is_dir())
        nbytes = sum(target.numels[t.sub_group] * t.dtype.itemsize for t in source.tensors)
        remedy = "name another folder with --output"
        check_space(parent, nbytes, f"cannot convert into {output}", remedy)
        working.mkdir(parents=True)
        _write(source, target, working, nbytes)
        for path in sorted(folder.glob("*_model_states.pt")):
            shutil.copy2(path, working)
            sync(working / path.name)
        working.rename(output)
        write_latest(str(output.parent), output.name, name="latest_universal")
    except CheckpointError:  # also an OSError, but with its own cause and remedy
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot convert into {output}: {error}. Likely cause: the folder cannot be written, "
            "or is full. Name another with --output"
        ) from error
    finally:
        source.close()
        shutil.rmtree(working, ignore_errors=True)
    return len(target.parameters)


def _find_states(folder: Path) -> list[Path]:
    """Return the optim_states.pt of each rank."""
    found: dict[int, Path] = {}
    for path in folder.glob("*optim_states.pt"):
        match = _STATES.fullmatch(path.name)
        if match is None or int(match[2]) != 0:
            raise CheckpointError(
                f"cannot convert {folder}: {path.name} is not of ZeRO stage 3 alone. Likely cause: "
                "the run also used another kind of parallelism. Use ds_to_universal.py"
            )
        found[int(match[1])] = path
    tags = sorted(path.parent.name for path in folder.glob("*/*optim_states.pt"))
    if not found and tags:
        raise CheckpointError(
            f"cannot convert {folder}: it is not the folder of one checkpoint, but contains "
            f"{', '.join(dict.fromkeys(tags))}. Name one of them"
        )
    for rank in range(max(found, default=0) + 1):
        if rank not in found:
            raise missing_file(folder / f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return [found[rank] for rank in sorted(found)]


def _survey(folder: Path, states: Sequence[Path]) -> tuple[SavedLayout, TargetOptimizer]:
    """Return the checkpoint's division, and a target with one sub-group per parameter."""
    world = len(states)
    manifests = [read_manifest(folder, rank) for rank in range(world)]
    _check_convertible(folder, manifests, world)
    model_states = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    parameters = read_parameters(model_states)
    if parameters is None:
        raise CheckpointError(
            f"cannot convert {folder}: {model_states.name} does not name the parameters. Likely "
            "cause: it was saved without an optimizer. Convert one that has optimizer states"
        )
    for parameter in flat(parameters):
        check_name(model_states, parameter.name)
    zero_states = read_zero_states(states[0])
    target = TargetOptimizer(
        names=[parameter.name for parameter in flat(parameters)],
        numels=[parameter.numel for parameter in flat(parameters)],
        group_count=len(zero_states["optimizer_state_dict"]["param_groups"]),
        kind=manifests[0].optimizer if manifests[0] is not None else "",
        master_dtype=zero_states["fp32_flat_groups"][0].dtype,
        parameters=[[parameter] for parameter in flat(parameters)],
        ids={parameter.name: number for number, parameter in enumerate(flat(parameters))},
    )
    ranks = [
        RankFiles(folder, rank, world, states[rank], manifest)
        for rank, manifest in enumerate(manifests)
    ]
    return SavedLayout(parameters, ranks), target


def _check_convertible(folder: Path, manifests: Sequence[Manifest | None], world: int) -> None:
    first = manifests[0]
    if first is not None and first.world != world:
        raise CheckpointError(
            f"cannot convert {folder}: it was saved by {first.world} ranks and has optimizer "
            f"states of {world}. Likely cause: it was not copied completely. Copy it again"
        )
    if first is None and (folder / "offloaded_tensors").is_dir():
        raise CheckpointError(
            f"cannot convert {folder}: it was saved by stock DeepSpeed's NVMe offload, whose files "
            "do not name their parameters. Load it with memascend, save it again, and convert that"
        )


def _widened(source: CheckpointSource, target: TargetOptimizer) -> CheckpointSource:
    """Return a source whose states are at least as wide as its master weights."""
    wide = target.master_dtype
    tensors = [
        converted(tensor, torch.promote_types(tensor.dtype, wide)) for tensor in source.tensors
    ]
    return dataclasses.replace(source, tensors=tensors)


def _write(source: CheckpointSource, target: TargetOptimizer, folder: Path, nbytes: int) -> None:
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    with byte_progress(f"writing {folder}", nbytes, leads=True) as advance:
        for tensor in source.tensors:
            own = folder / "zero" / target.names[tensor.sub_group]
            own.mkdir(parents=True, exist_ok=True)
            numel = target.numels[tensor.sub_group]
            write = functools.partial(_pour, tensor.reader, numel * tensor.dtype.itemsize, buffer)
            with SummedFile.create(own / f"{tensor.state or 'fp32'}.pt", advance) as file:
                save_streamed(StreamedTensor(numel, tensor.dtype, write), file)
            tensor.reader.close()
    with SummedFile.create(folder / "zero" / "optimizer_state.pt") as file:
        save_streamed(_common(source), file)


def _pour(reader: Reader, nbytes: int, buffer: torch.Tensor, append: Write) -> None:
    for begin in range(0, nbytes, PIECE_BYTES):
        piece = buffer[: nbytes - begin]
        reader.fill(begin, piece)
        append(piece.numpy())


def _common(source: CheckpointSource) -> dict[str, Any]:
    """Return the state shared by all parameters, without tensors; like upstream, from rank 0."""
    states = source.optimizer_states["state"]
    groups = source.optimizer_states["param_groups"]
    scalars = {
        number: {name: value for name, value in values.items() if is_scalar(value)}
        for number, values in states.items()
    }
    kept = {k: v for k, v in source.zero_states.items() if k != "fp32_flat_groups"}
    return kept | {
        "optimizer_state_dict": {"state": scalars, "param_groups": groups},
        "param_groups": groups,
    }
