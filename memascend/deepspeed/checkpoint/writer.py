"""Writes one rank's tensors and manifest into a checkpoint, after DeepSpeed's own files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.base.progress import Advance, byte_progress
from memascend.checkpoint.files import SummedFile, sum_file
from memascend.checkpoint.folder import SavingFolder, check_space
from memascend.checkpoint.manifest import (
    FileEntry,
    Manifest,
    SavedPowers,
    SubGroupEntry,
    TensorEntry,
    manifest_name,
)
from memascend.checkpoint.torch_file import StreamedTensor, Write, save_streamed
from memascend.deepspeed.checkpoint.frozen import frozen_parameters, put_in
from memascend.deepspeed.optimizer.restore import StoredTensor, stored_tensors
from memascend.system.files import sync, write_durably
from memascend.version import __version__

if TYPE_CHECKING:
    from memascend.deepspeed.optimizer.beta_powers import BetaPowers
    from memascend.deepspeed.optimizer.optimizer import ZeroOptimizer
    from memascend.deepspeed.optimizer.upstream import Upstream


def write_rank(engine: Any, folder: SavingFolder, rank: int, *, leads: bool) -> None:
    """Write this rank's tensors and manifest, and make its files durable.

    The folder has DeepSpeed's files already. `rank` is the number in file names (`rank_of`).

    Raises:
        CheckpointError: The file system is full or gone.
        StoreError: A tensor could not be read.
    """
    optimizer: ZeroOptimizer = engine.optimizer
    tensors = stored_tensors(optimizer.upstream, optimizer.steps, optimizer.settings.aio)
    runtime = optimizer.attachment.runtime
    is_portable = runtime.config.checkpoint.portable
    twice = [tensor for tensor in tensors if tensor.state is None or is_portable]
    once = [tensor for tensor in tensors if tensor.state is not None and not is_portable]
    # DeepSpeed's files of this rank, for the module and for the optimizer.
    names = str(folder.path.parent), folder.path.name
    model_states = Path(engine._get_ckpt_name(*names))
    zero_states = Path(engine._get_zero_ckpt_name(*names))
    nbytes = sum(t.padded_bytes for t in tensors) + sum(t.nbytes for t in twice)
    frozen = frozen_parameters(engine)
    if frozen:
        module = torch.load(model_states, map_location="cpu", weights_only=False)
        nbytes += put_in(module, frozen, runtime.staging)
    smaller = ', or set "checkpoint": {"portable": false}' if is_portable else ""
    check_space(folder.path, nbytes, f"cannot save to {folder.target}", f"save elsewhere{smaller}")
    optimizer.steps.settle()
    target = folder.path / "offloaded_tensors" / f"rank{rank:02d}"
    target.mkdir(parents=True)
    nbytes += model_states.stat().st_size + zero_states.stat().st_size
    saving = byte_progress(f"saving {folder.target}", nbytes, leads=leads)
    with runtime.lock, saving as advance:
        writer = _Writer(folder.path, target, advance)
        writer.add_also_to(zero_states, twice)
        for tensor in once:
            writer.add(tensor)
        if frozen:
            writer.replace(model_states, module)
        else:
            writer.note(model_states, *sum_file(model_states, advance))
    # This rank may have written other files too; a second sync of a file costs nothing.
    for path in folder.path.iterdir():
        if path.is_file():
            sync(path)
    text = _manifest(engine, rank, tensors, writer.files).text()
    write_durably(folder.path / manifest_name(rank), text)


class _Writer:
    """Writes files and collects their manifest entries."""

    def __init__(self, folder: Path, target: Path, advance: Advance) -> None:
        self._folder, self._target = folder, target
        self._advance = advance
        self.files: list[FileEntry] = []

    def note(self, path: Path, nbytes: int, crc32: int) -> None:
        name = path.relative_to(self._folder).as_posix()
        self.files.append(FileEntry(name=name, nbytes=nbytes, crc32=f"{crc32:08x}"))

    def add(self, tensor: StoredTensor, also: Write | None = None) -> None:
        """Write the file of a tensor; `also` gets the same bytes."""
        path = self._target / tensor.file_name
        with SummedFile.create(path, self._advance) as file:
            for staged in tensor.read():
                file.write(staged.numpy())
                if also is not None:
                    also(staged.numpy())
            file.write(bytes(tensor.padded_bytes - tensor.nbytes))
        self.note(path, file.nbytes, file.crc32)

    def add_also_to(self, path: Path, tensors: list[StoredTensor]) -> None:
        """Rewrite DeepSpeed's file with the tensors that its tools expect there.

        `zero_to_fp32.py` reads the master weights, `ds_to_universal.py` and CPU offload the states
        too. Each tensor is read once and written to this file and to its own file.
        """
        content = torch.load(path, map_location="cpu", weights_only=False)
        zero_states = content["optimizer_state_dict"]
        masters = zero_states["fp32_flat_groups"] = list(zero_states["fp32_flat_groups"])
        states = zero_states["optimizer_state_dict"]["state"]
        for tensor in tensors:
            write = functools.partial(self.add, tensor)
            streamed = StreamedTensor(numel=tensor.numel, dtype=tensor.dtype, write=write)
            if tensor.state is None:
                masters[tensor.sub_group] = streamed
            else:
                states.setdefault(tensor.sub_group, {})[tensor.state] = streamed
        self.replace(path, content)

    def replace(self, path: Path, content: object) -> None:
        path.unlink()
        with SummedFile.create(path, self._advance) as file:
            save_streamed(content, file)
        self.note(path, file.nbytes, file.crc32)


def _manifest(
    engine: Any, rank: int, tensors: list[StoredTensor], files: list[FileEntry]
) -> Manifest:
    optimizer: ZeroOptimizer = engine.optimizer
    upstream = optimizer.upstream
    return Manifest.model_validate(
        {
            "memascend": __version__,
            "rank": rank,
            "world": int(engine.seq_dp_world_size),
            "global_step": int(engine.global_steps),
            "optimizer": type(upstream.base).__name__,
            "optimizer_step": _step(upstream),
            "powers": _powers(optimizer.steps.powers),
            "sub_groups": tuple(
                SubGroupEntry(name=name, numel=int(numel))
                for name, numel in zip(upstream.names, upstream.numels, strict=True)
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


def _powers(powers: BetaPowers | None) -> dict[str, Any] | None:
    """Return the entry of the running powers of Adam's betas; None if they are unknown."""
    if powers is None:
        return None
    return {name: getattr(powers, name) for name in SavedPowers.model_fields}


def _step(upstream: Upstream) -> int | None:
    """Return the optimizer's count of steps, without overflowed ones; None if it has none."""
    for master in upstream.masters:
        step = upstream.base.state.get(master, {}).get("step")
        if isinstance(step, int | float | torch.Tensor):
            return int(step)
    return None
