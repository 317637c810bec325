"""Opens a checkpoint in its folder: finds its files, verifies them, and reads tensor by tensor.

Everything is checked before the running model changes: files against the manifest, and tensors
against the sub-groups of the target optimizer. A checkpoint without a manifest was saved by stock
DeepSpeed; then only sizes can be compared. Tensors that stock's NVMe offload keeps in memory, and
all tensors of CPU offload, are in `optim_states.pt`, which is mapped, not read.
"""

from __future__ import annotations

import copy
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from memascend.base.progress import Advance
from memascend.checkpoint.files import FileReader, Reader, TensorReader, sum_file
from memascend.checkpoint.layout import SubGroups
from memascend.checkpoint.manifest import (
    FileEntry,
    Manifest,
    SavedPowers,
    check_file,
    check_nbytes,
    missing_file,
)
from memascend.errors import CheckpointError

_FILE_NAME = re.compile(r"(?:(?P<state>.+)-)?(?P<first>\d+)_(?P<last>\d+)\.tensor\.swp")


@dataclass(frozen=True, slots=True)
class _File:
    """A tensor's file."""

    path: Path
    #: As the manifest states it; "": that of the placeholder in DeepSpeed's file. Placeholders of
    #: ours have the dtype in which a run keeps a state, and files may have a wider one.
    dtype: str = ""


#: By sub-group and state.
Files = Mapping[tuple[int, str | None], _File]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """A rank's part of a checkpoint."""

    folder: Path  # folder of the tag
    rank: int
    world: int  # number of ranks that saved it
    states: Path  # the rank's optim_states.pt
    manifest: Manifest | None  # the rank's manifest; None if it was saved without memascend

    @property
    def tensors(self) -> Path:
        """Folder of the tensors' files."""
        return self.folder / "offloaded_tensors" / f"rank{self.rank:02d}"


@dataclass(frozen=True, slots=True)
class TargetOptimizer:
    """The optimizer to restore."""

    names: Sequence[str]  # DeepSpeed's name of each sub-group
    numels: Sequence[int]  # elements of each sub-group on this rank
    group_count: int  # number of parameter groups
    kind: str  # name of the optimizer's class
    master_dtype: torch.dtype
    parameters: SubGroups = ()  # parameters of each sub-group
    groups: Sequence[int] = ()  # index of each sub-group's parameter group
    ids: Mapping[str, int] = field(default_factory=dict)  # DeepSpeed's ids of parameters, by name

    def regroup(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved parameter groups, with the indices of the present sub-groups."""
        return [
            {**group, "params": [index for index, own in enumerate(self.groups) if own == number]}
            for number, group in enumerate(saved)
        ]


@dataclass(frozen=True, slots=True)
class LoadedTensor:
    """A checkpoint's tensor, not read yet; `state` is None for the master weights."""

    sub_group: int
    state: str | None
    dtype: torch.dtype
    reader: Reader


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A verified checkpoint."""

    zero_states: Mapping[str, Any]  # saved state of DeepSpeed's ZeRO optimizer
    optimizer_states: dict[str, Any]  # saved state of the base optimizer, with empty tensors
    tensors: list[LoadedTensor]
    model_states: Path | None = None  # the file for the module; None: the one DeepSpeed chooses
    powers: SavedPowers | None = None  # running ones of Adam's betas; None: unknown

    def weights(self) -> list[LoadedTensor]:
        """Return only the master weights."""
        return [tensor for tensor in self.tensors if tensor.state is None]

    def add(
        self,
        sub_group: int,
        readers: Mapping[str | None, tuple[torch.dtype, Reader]],
        scalars: Mapping[str, Any],
    ) -> None:
        """Add a sub-group: its tensors by state, and values shared by all its elements."""
        for state, (dtype, reader) in readers.items():
            self.tensors.append(LoadedTensor(sub_group, state, dtype, reader))
        # Copied: a step count that is a shared tensor would be advanced once per sub-group.
        values = copy.deepcopy(dict(scalars))
        values |= {s: torch.empty(0, dtype=d) for s, (d, _) in readers.items() if s is not None}
        if values:
            self.optimizer_states["state"][sub_group] = values

    def close(self) -> None:
        """Close every file."""
        for tensor in self.tensors:
            tensor.reader.close()


def check_folder(folder: Path) -> None:
    """Raise CheckpointError if a checkpoint's folder does not exist, with those that do."""
    if not folder.is_dir():
        known = sorted(path.name for path in folder.parent.glob("*") if path.is_dir())
        raise CheckpointError(
            f"there is no checkpoint {folder}. Likely cause: a wrong tag or folder. "
            f"{folder.parent} has: {', '.join(known[:8]) or 'nothing'}"
        )


def verify(folder: Path, entries: Sequence[FileEntry], advance: Advance) -> None:
    """Compare files with their manifest entries: first all sizes, then each file's CRC-32.

    Raises:
        CheckpointError: A file is missing or differs; states expected and found values.
    """
    for entry in entries:
        path = folder / entry.name
        if not path.is_file():
            raise missing_file(path)
        nbytes = path.stat().st_size
        if nbytes != entry.nbytes:
            check_file(folder, entry, nbytes, 0)
    for entry in entries:
        check_file(folder, entry, *sum_file(folder / entry.name, advance))


def open_source(part: RankFiles, target: TargetOptimizer) -> CheckpointSource:
    """Find every tensor of an optimizer.

    Raises:
        CheckpointError: The checkpoint is of another model or configuration, or incomplete.
    """
    zero_states = read_zero_states(part.states)
    if part.manifest is not None:
        found = [group.numel for group in part.manifest.sub_groups]
        if found != list(target.numels):
            raise _other_model(part, f"sub-groups of {found}", list(target.numels))
        if part.manifest.optimizer != target.kind:
            raise _other_model(part, f"optimizer {part.manifest.optimizer}", target.kind)
        files: Files = {
            (tensor.sub_group, tensor.state): _File(part.folder / tensor.file, tensor.dtype)
            for tensor in part.manifest.tensors
        }
    else:
        _check_world(part, zero_states)
        found_files = _stock_files(part.tensors, target.names)
        files = {key: _File(path) for key, path in found_files.items()}
    groups = zero_states["optimizer_state_dict"]["param_groups"]
    count = sum(len(group["params"]) for group in groups)
    if (len(groups), count) != (target.group_count, len(target.numels)):
        raise _other_model(
            part,
            f"{len(groups)} parameter groups with {count} sub-groups",
            f"{target.group_count} with {len(target.numels)}",
        )
    powers = None if part.manifest is None else part.manifest.powers
    source = CheckpointSource(zero_states, {"param_groups": groups, "state": {}}, [], powers=powers)
    try:
        for sub_group in range(len(target.numels)):
            _add_sub_group(source, part, target, files, sub_group)
    except BaseException:
        source.close()
        raise
    return source


def _add_sub_group(
    source: CheckpointSource, part: RankFiles, target: TargetOptimizer, files: Files, sub_group: int
) -> None:
    numel, name = target.numels[sub_group], target.names[sub_group]
    masters = source.zero_states["fp32_flat_groups"]
    values: dict[str | None, torch.Tensor] = {None: masters[sub_group].detach()}
    values |= source.zero_states["optimizer_state_dict"]["state"].get(sub_group, {})
    readers: dict[str | None, tuple[torch.dtype, Reader]] = {}
    scalars: dict[str, Any] = {}
    for state, value in values.items():
        file = files.get((sub_group, state))
        if file is None and state is not None:
            # A verified checkpoint has all of its files: a state without one was still empty.
            is_verified = part.manifest is not None
            is_tensor = _is_elementwise(state, value, numel)
            if not is_tensor or (is_verified and value.numel() == 0):
                scalars[state] = value
                continue
        if value.dtype != target.master_dtype and state is None:
            raise _other_model(part, f"master weights in {value.dtype}", target.master_dtype)
        reader: Reader
        dtype = value.dtype
        if file is not None:
            name_of_dtype = file.dtype or str(dtype).removeprefix("torch.")
            check_nbytes(file.path, file.path.stat().st_size, numel, name_of_dtype)
            dtype, reader = getattr(torch, name_of_dtype), FileReader(file.path)
        elif value.numel() == numel:
            is_mapped = zipfile.is_zipfile(part.states)
            reader = TensorReader(value.detach, is_mapped=is_mapped)
        else:
            what = f"{state}-{name}" if state else name
            raise missing_file(part.tensors / f"{what}.tensor.swp")
        readers[state] = dtype, reader
    source.add(sub_group, readers, scalars)


def _is_elementwise(state: str, value: object, numel: int) -> bool:
    """Return whether a value is a sub-group's tensor, or an empty placeholder of one in a file."""
    if not isinstance(value, torch.Tensor) or state == "step":
        return False
    return value.shape in ((numel,), (0,))


def read_torch_file(path: Path) -> Any:
    """Return the content of a torch file, with tensors mapped instead of read.

    Tensors of a file in torch's old format are read into memory.

    Raises:
        CheckpointError: The file is missing, or cannot be read.
    """
    if not path.is_file():
        raise missing_file(path)
    try:
        is_mapped = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", mmap=is_mapped or None, weights_only=False)
    except Exception as error:
        raise _unreadable_file(path, error) from error


def _unreadable_file(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file with unexpected content."""
    return CheckpointError(
        f"checkpoint file {path} cannot be read: {error!r:.200}. Likely cause: it is damaged, or "
        "of another ZeRO stage. Copy the checkpoint again, or load another tag"
    )


def read_zero_states(path: Path) -> Mapping[str, Any]:
    """Return the state of DeepSpeed's ZeRO optimizer from an optim_states.pt.

    Raises:
        CheckpointError: The file is missing, cannot be read, or is of another ZeRO stage.
    """
    content = read_torch_file(path)
    try:
        zero_states: dict[str, Any] = content["optimizer_state_dict"]
        zero_states["fp32_flat_groups"]
        zero_states["optimizer_state_dict"]["param_groups"]
    except Exception as error:
        raise _unreadable_file(path, error) from error
    return zero_states


def _stock_files(folder: Path, names: Sequence[str]) -> dict[tuple[int, str | None], Path]:
    """Return stock's files by sub-group and state.

    File names contain the ids of a sub-group's first and last parameter. Ids keep increasing from
    model to model in a process, so saved and present ids may differ by a constant.
    """
    found: dict[tuple[int, int], dict[str | None, Path]] = {}
    for path in folder.glob("*.tensor.swp"):
        match = _FILE_NAME.fullmatch(path.name)
        if match is not None and "gradient" not in path.name:
            ids = int(match["first"]), int(match["last"])
            found.setdefault(ids, {})[match["state"]] = path
    if not found:
        return {}
    present = {tuple(map(int, name.split("_"))): index for index, name in enumerate(names)}
    first = min(found)
    shifts = sorted((ids[0] - first[0] for ids in present), key=abs)
    for shift in shifts:
        moved = {(begin + shift, end + shift): paths for (begin, end), paths in found.items()}
        if moved.keys() <= present.keys():
            return {
                (present[ids], state): path
                for ids, paths in moved.items()
                for state, path in paths.items()
            }
    saved = ", ".join(f"{begin}_{end}" for begin, end in sorted(found)[:4])
    raise CheckpointError(
        f"checkpoint folder {folder} has files of other sub-groups: {saved}, the optimizer has "
        f"{', '.join(names[:4])}. Likely cause: it was saved with another model. Load it with the "
        "configuration that saved it"
    )


class _CountedReader:
    """A reader that reports the bytes read."""

    def __init__(self, reader: Reader, advance: Advance) -> None:
        self._reader, self._advance = reader, advance

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        self._reader.fill(begin_bytes, target)
        self._advance(target.numel())

    def close(self) -> None:
        self._reader.close()


def counted(tensor: LoadedTensor, advance: Advance) -> LoadedTensor:
    """Return a checkpoint's tensor whose reads call `advance` with their bytes."""
    return replace(tensor, reader=_CountedReader(tensor.reader, advance))


def saved_world(zero_states: Mapping[str, Any], default: int) -> int:
    """Return the number of ranks that saved a ZeRO optimizer; `default` if it is not stated."""
    count = zero_states.get("partition_count", default)
    return int(max(count) if isinstance(count, list) else count)


def _check_world(part: RankFiles, zero_states: Mapping[str, Any]) -> None:
    saved = saved_world(zero_states, part.world)
    if saved != part.world:
        raise CheckpointError(
            f"checkpoint file {part.states} was saved by {saved} ranks, the checkpoint by "
            f"{part.world}. Likely cause: files of several checkpoints in one folder. Copy the "
            "checkpoint again, or load another tag"
        )


def _other_model(part: RankFiles, saved: object, wanted: object) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {part.folder} has {saved}, the optimizer has {wanted}. Likely cause: it was "
        "saved with another model, optimizer or sub_group_size. Load it with the configuration "
        "that saved it"
    )
