"""Writes one rank's tensors and manifest into a checkpoint that DeepSpeed has begun."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.files import FileSum, SummedFile, sum_file, write_file
from memascend.checkpoint.folder import SavingFolder, sync, write_durably
from memascend.checkpoint.manifest import (
    FileEntry,
    Manifest,
    SubGroupEntry,
    TensorEntry,
    manifest_name,
)
from memascend.checkpoint.progress import ByteProgress
from memascend.checkpoint.torch_file import StreamedTensor, Write, save_streamed
from memascend.deepspeed.optimizer.restore import StoredTensor, stored_tensors
from memascend.errors import CheckpointError
from memascend.streaming.staging import StagingSlots
from memascend.version import __version__

if TYPE_CHECKING:
    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer


def write_rank(engine: Any, folder: SavingFolder, rank: int, *, leads: bool) -> None:
    """Writes what DeepSpeed left to us, and makes this rank's files durable.

    Args:
        engine: DeepSpeed's.
        folder: The working folder, with DeepSpeed's files in it.
        rank: Whose part.
        leads: Whether this rank shows progress.

    Raises:
        CheckpointError: The file system is full or gone.
        StoreError: A tensor could not be read.
    """
    optimizer: ZeroOptimizer = engine.optimizer
    tensors = stored_tensors(optimizer, engine._config._param_dict.get("aio", {}))
    runtime = optimizer.attachment.runtime
    is_portable = runtime.config.checkpoint.portable
    twice = [tensor for tensor in tensors if tensor.state is None or is_portable]
    once = [tensor for tensor in tensors if tensor.state is not None and not is_portable]
    nbytes = sum(tensor.padded_bytes for tensor in tensors)
    _check_space(folder.path, nbytes + sum(tensor.nbytes for tensor in twice), is_portable)
    optimizer.settle()
    target = folder.path / "offloaded_tensors" / f"rank{rank:02d}"
    target.mkdir(parents=True)
    slots = runtime.staging
    model_states, zero_states = _own_files(engine, folder)
    with ByteProgress(f"saving {folder.target}", nbytes, leads=leads) as progress:
        writer = _Writer(folder.path, target, slots, progress)
        writer.add_also_to(zero_states, twice)
        for tensor in once:
            writer.add(tensor)
    found = sum_file(model_states, slots, lambda _: None)
    writer.files.append(_entry(folder.path, model_states, found))
    # Others of DeepSpeed's files may be this rank's too; what is durable already costs nothing.
    for path in folder.path.iterdir():
        if path.is_file():
            sync(path)
    text = _manifest(engine, rank, tensors, writer.files).text()
    write_durably(folder.path / manifest_name(rank), text)


class _Writer:
    """Writes files and keeps the manifest's account of them."""

    def __init__(
        self, folder: Path, target: Path, slots: StagingSlots, progress: ByteProgress
    ) -> None:
        self._folder, self._target = folder, target
        self._slots, self._progress = slots, progress
        self.files: list[FileEntry] = []

    def add(self, tensor: StoredTensor, also: Write | None = None) -> None:
        """Writes the file of a tensor; `also` gets its bytes too."""
        path = self._target / tensor.file_name
        with SummedFile.create(path) as file:
            write_file(
                self._slots,
                key=tensor.key,
                nbytes=tensor.nbytes,
                padded_bytes=tensor.padded_bytes,
                file=file,
                advance=self._progress.advance,
                also=also,
            )
        self.files.append(_entry(self._folder, path, file.sum()))

    def add_also_to(self, path: Path, tensors: list[StoredTensor]) -> None:
        """Writes DeepSpeed's file again with tensors that its tools take for granted there.

        `zero_to_fp32.py` reads the master weights, `ds_to_universal.py` and CPU offload the states
        too. They pass by on their way into files of their own.
        """
        content = torch.load(path, map_location="cpu", weights_only=False)
        zero_states = content["optimizer_state_dict"]
        masters = list(zero_states["fp32_flat_groups"])
        states = zero_states["optimizer_state_dict"]["state"]
        for tensor in tensors:
            streamed = StreamedTensor(
                numel=tensor.numel,
                dtype=tensor.dtype,
                write=functools.partial(self.add, tensor),
            )
            if tensor.state is None:
                masters[tensor.sub_group] = streamed
            else:
                states.setdefault(tensor.sub_group, {})[tensor.state] = streamed
        zero_states["fp32_flat_groups"] = masters
        path.unlink()
        with SummedFile.create(path) as file:
            save_streamed(content, file)
        self.files.append(_entry(self._folder, path, file.sum()))


def _check_space(path: Path, nbytes: int, is_portable: bool) -> None:
    """Before hours are spent: is there room for this rank's tensors?"""
    free_bytes = shutil.disk_usage(path).free
    if free_bytes < nbytes:
        smaller = ', or set "checkpoint": {"portable": false}' if is_portable else ""
        raise CheckpointError(
            f"cannot save to {path.parent}: {nbytes} bytes are needed, {free_bytes} are free. "
            f"Likely cause: older checkpoints. Remove some, save elsewhere{smaller}"
        )


def _own_files(engine: Any, folder: SavingFolder) -> tuple[Path, Path]:
    """DeepSpeed's files of this rank: of the module, and of the optimizer."""
    save_dir = str(folder.path.parent)
    tag = folder.path.name
    return (
        Path(engine._get_ckpt_name(save_dir, tag)),
        Path(engine._get_zero_ckpt_name(save_dir, tag)),
    )


def _entry(folder: Path, path: Path, found: FileSum) -> FileEntry:
    name = path.relative_to(folder).as_posix()
    return FileEntry(name=name, nbytes=found.nbytes, crc32=f"{found.crc32:08x}")


def _manifest(
    engine: Any, rank: int, tensors: list[StoredTensor], files: list[FileEntry]
) -> Manifest:
    optimizer: ZeroOptimizer = engine.optimizer
    parameters = optimizer.fp32_partitioned_groups_flat
    numels = optimizer.fp16_partitioned_groups_flat_numel
    return Manifest.model_validate(
        {
            "memascend": __version__,
            "rank": rank,
            "world": int(engine.seq_dp_world_size),
            "global_step": int(engine.global_steps),
            "optimizer": type(optimizer.optimizer).__name__,
            "optimizer_step": _step(optimizer),
            "sub_groups": tuple(
                SubGroupEntry(name=parameter.ds_id, numel=int(numel))
                for parameter, numel in zip(parameters, numels, strict=True)
            ),
            "tensors": tuple(
                TensorEntry(
                    sub_group=tensor.sub_group,
                    state=tensor.state,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    numel=tensor.numel,
                    file=f"offloaded_tensors/rank{rank:02d}/{tensor.file_name}",
                )
                for tensor in tensors
            ),
            "files": tuple(files),
        }
    )


def _step(optimizer: ZeroOptimizer) -> int | None:
    """The optimizer's own count, which leaves out steps that overflowed; None where it has none."""
    for parameter in optimizer.fp32_partitioned_groups_flat:
        step = optimizer.optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, int | float | torch.Tensor):
            return int(step)
    return None
