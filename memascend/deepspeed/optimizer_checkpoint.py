"""Optimizer tensors between the store and the files that DeepSpeed's checkpoint code copies.

DeepSpeed saves NVMe optimizer state by copying the swapper's folder. Our tensors have no files, so
they are written there for the duration of a save, under stock's names and in stock's layout, and
are read from there after a load. As in stock 0.19.8, a load restores the master weights; Adam's
moments start anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from memascend.deepspeed.streamed_swapper import StreamedSwapper
from memascend.resident import ResidentStore

_CHUNK_BYTES = 16 << 20
#: Upstream's swap_folder is `optimizer/rankN` in the folder it was given.
_FOLDER_DEPTH = 2


def export_files(swapper: Any, store: ResidentStore) -> None:
    """Writes every optimizer tensor of the swapper into its folder, gradients left out."""
    os.makedirs(swapper.swap_folder, mode=0o700, exist_ok=True)
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for path, key in _tensors(swapper):
        if not store.contains(key=key):
            continue
        with open(path, "wb") as file:
            for offset, piece in _pieces(buffer, store.nbytes(key=key)):
                store.read(key=key, target=piece, offset_bytes=offset).wait()
                file.write(piece.numpy().data)


def import_files(swapper: Any, store: ResidentStore) -> None:
    """Takes the files of the swapper's folder into the store and removes them.

    Raises:
        OSError: A file is shorter than the tensor it belongs to.
    """
    buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for path, key in _tensors(swapper):
        if not os.path.exists(path):
            continue
        nbytes = os.path.getsize(path)
        if store.contains(key=key) and nbytes != store.nbytes(key=key):
            raise OSError(
                f"checkpoint file {path} has {nbytes} bytes, the optimizer needs "
                f"{store.nbytes(key=key)}: it was saved with another model, sub_group_size or "
                "number of ranks"
            )
        store.reserve(key=key, nbytes=nbytes)
        with open(path, "rb") as file:
            for offset, piece in _pieces(buffer, nbytes):
                if file.readinto(piece.numpy().data) != piece.numel():
                    raise OSError(f"checkpoint file {path} ended at byte {offset}")
                store.write(key=key, source=piece, offset_bytes=offset).wait()
    remove_files(swapper)


def remove_files(swapper: Any) -> None:
    """Removes the folder again: between checkpoints nothing of ours is visible on the drive."""
    folder = swapper.swap_folder
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another rank's files are there
        for _ in range(_FOLDER_DEPTH):
            folder = os.path.dirname(folder)
            os.rmdir(folder)


def all_keys(swapper: Any) -> Iterator[str]:
    """Every key of the swapper in the store, gradients included."""
    for swap_info in swapper.swap_params_info.values():
        yield from swap_info.get_swap_paths()
        yield from swap_info.get_swap_gradient_paths()


def _tensors(swapper: Any) -> Iterator[tuple[str, str]]:
    """File and key of every tensor; for DeepSpeed's own swapper the key is the file's path."""
    if isinstance(swapper, StreamedSwapper):
        yield from swapper.tensors()
        return
    for swap_info in swapper.swap_params_info.values():
        for path in swap_info.get_swap_paths():
            yield path, path


def _pieces(buffer: torch.Tensor, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    for offset in range(0, nbytes, buffer.numel()):
        yield offset, buffer[: min(buffer.numel(), nbytes - offset)]
