"""Writes small checkpoints as any number of ranks would have saved them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from memascend.checkpoint.divided import SavedLayout
from memascend.checkpoint.layout import NamedParameter, SubGroups, runs, sub_group_numel
from memascend.checkpoint.manifest import (
    FileEntry,
    Manifest,
    SubGroupEntry,
    TensorEntry,
    manifest_name,
)
from memascend.checkpoint.source import CheckpointSource, RankFiles, TargetOptimizer

#: Elements of each parameter of a small model.
MODEL = {"a": 103, "b": 1, "c": 50, "d": 2}
STATES = (None, "exp_avg", "exp_avg_sq")
Values = dict[tuple[str, str | None], torch.Tensor]


def values_of(parameters: Mapping[str, int]) -> Values:
    """Random values for every parameter's master weights and moments."""
    return {(name, s): torch.randn(numel) for name, numel in parameters.items() for s in STATES}


def sub_groups(parameters: Mapping[str, int], *names: str) -> SubGroups:
    """Sub-groups by the names of their parameters: "a b", "c"."""
    return [[NamedParameter(name, parameters[name]) for name in group.split()] for group in names]


def shard(
    values: Values, group: Sequence[NamedParameter], state: str | None, rank: int, world: int
) -> torch.Tensor:
    """What a rank holds of a sub-group; padding is a value that no one may take over."""
    flat = torch.full((sub_group_numel(group, world),), 99.0)
    for run in runs(group, rank=rank, world=world):
        source = values[run.name, state][run.first : run.first + run.numel]
        flat[run.offset : run.offset + run.numel] = source
    return flat


def optim_states(folder: Path, rank: int) -> Path:
    return folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_states(folder: Path, rank: int) -> Path:
    return folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def write(
    folder: Path,
    values: Values,
    groups: SubGroups,
    *,
    world: int,
    in_files: bool,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    step: int | torch.Tensor = 3,
    state_dtype: torch.dtype = torch.float32,
) -> SavedLayout:
    """Writes what each rank would have saved.

    Args:
        folder: Made here.
        values: Of the whole model.
        groups: Its sub-groups.
        world: How many ranks.
        in_files: As memascend saves, in files of their own and with manifests; else as CPU offload
            does, in optim_states.pt.
        param_groups: Settings of each parameter group; None for a single one.
        step: How often the optimizer has stepped.
        state_dtype: Of moments.
    """
    folder.mkdir()
    param_groups = param_groups or [{"lr": 0.1, "params": list(range(len(groups)))}]
    shapes = [{p.name: torch.Size([p.numel]) for p in group} for group in groups]
    manifests = []
    for rank in range(world):
        shards = {
            (index, state): shard(values, group, state, rank, world).to(
                torch.float32 if state is None else state_dtype
            )
            for index, group in enumerate(groups)
            for state in STATES
        }
        there = {key: value[:0] if in_files else value for key, value in shards.items()}
        state = {
            index: {"step": step, **{s: there[index, s] for s in STATES if s}}
            for index in range(len(groups))
        }
        zero = {
            "partition_count": world,
            "loss_scaler": None,
            "fp32_flat_groups": [there[index, None] for index in range(len(groups))],
            "optimizer_state_dict": {"state": state, "param_groups": param_groups},
        }
        torch.save({"optimizer_state_dict": zero}, optim_states(folder, rank))
        torch.save({"param_shapes": shapes}, model_states(folder, rank))
        manifests.append(_write_files(folder, rank, world, groups, shards) if in_files else None)
    ranks = [
        RankFiles(folder, rank, world, optim_states(folder, rank), manifest)
        for rank, manifest in enumerate(manifests)
    ]
    return SavedLayout(groups, ranks)


def _write_files(
    folder: Path,
    rank: int,
    world: int,
    groups: SubGroups,
    shards: Mapping[tuple[int, str | None], torch.Tensor],
) -> Manifest:
    files, tensors = [], []
    (folder / "offloaded_tensors" / f"rank{rank:02d}").mkdir(parents=True)
    for (index, state), value in shards.items():
        name = f"offloaded_tensors/rank{rank:02d}/{state}-{index}.tensor.swp"
        content = value.view(torch.uint8).numpy().tobytes() + bytes(60)
        (folder / name).write_bytes(content)
        crc32 = f"{zlib.crc32(content):08x}"
        files.append(FileEntry(name=name, nbytes=len(content), crc32=crc32))
        tensors.append(
            TensorEntry(
                sub_group=index,
                state=state,
                dtype=str(value.dtype).removeprefix("torch."),
                numel=value.numel(),
                file=name,
            )
        )
    manifest = Manifest(
        memascend="0",
        rank=rank,
        world=world,
        global_step=3,
        optimizer="Adam",
        optimizer_step=3,
        sub_groups=tuple(
            SubGroupEntry(name=str(index), numel=sub_group_numel(group, world))
            for index, group in enumerate(groups)
        ),
        tensors=tuple(tensors),
        files=tuple(files),
    )
    (folder / manifest_name(rank)).write_text(manifest.text())
    return manifest


def target_of(
    groups: SubGroups, world: int, param_groups: Sequence[int] | None = None
) -> TargetOptimizer:
    """An optimizer with these sub-groups, each in the parameter group given for it."""
    owners = list(param_groups or [0] * len(groups))
    names = [parameter.name for group in groups for parameter in group]
    return TargetOptimizer(
        names=[group[0].name for group in groups],
        numels=[sub_group_numel(group, world) for group in groups],
        group_count=max(owners) + 1,
        kind="Adam",
        master_dtype=torch.float32,
        parameters=groups,
        groups=owners,
        ids={name: number for number, name in enumerate(sorted(names))},
    )


def contents(
    source: CheckpointSource, target: TargetOptimizer
) -> dict[tuple[int, str | None], list[float]]:
    """Every tensor of a source, read in pieces that are a multiple of nothing."""
    found = {}
    for tensor in source.tensors:
        nbytes = target.numels[tensor.sub_group] * tensor.dtype.itemsize
        filled = torch.empty(nbytes, dtype=torch.uint8)
        for begin in range(0, filled.numel(), 52):
            tensor.reader.fill(begin, filled[begin : begin + 52])
        found[tensor.sub_group, tensor.state] = filled.view(tensor.dtype).tolist()
    source.close()
    return found


def expected(
    values: Values, groups: SubGroups, rank: int, world: int
) -> dict[tuple[int, str | None], list[float]]:
    """What a rank has to find; where a shard is padding there are zeros."""
    found = {}
    for index, group in enumerate(groups):
        for state in STATES:
            flat = shard(values, group, state, rank, world)
            found[index, state] = torch.where(flat == 99.0, 0.0, flat).tolist()
    return found
