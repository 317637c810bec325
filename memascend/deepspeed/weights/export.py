"""The whole 16-bit model for saving, in a file on the drive instead of in host memory.

DeepSpeed's `save_16bit_model`, accelerate's `get_state_dict` and the Trainer's `save_model` ask the
engine for a consolidated state dict on rank 0: two bytes for every parameter. Here each parameter
is gathered, written to an unnamed file below `nvme_path` and let go; the tensors of the dict are
that file, mapped. Its pages are the kernel's to drop, and its space is free again when the dict is.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.base.units import format_nbytes
from memascend.deepspeed.attach.attachment import Attachment, attachment_of
from memascend.errors import StoreError, StoreFullError
from memascend.streaming.staging import StagingSlots

log = logging.getLogger(__name__)

#: Written bytes after which they are made durable and leave the page cache.
FLUSH_BYTES = 256 << 20

StateDict = OrderedDict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One name of the state dict: a parameter, or a buffer."""

    key: str
    tensor: Any
    is_parameter: bool


def wrap_consolidate(original: Callable[..., StateDict | None]) -> Callable[..., Any]:
    """Replaces DeepSpeedEngine._zero3_consolidated_16bit_state_dict for engines with a block."""

    @functools.wraps(original)
    def consolidate(engine: Any, exclude_frozen_parameters: bool = False) -> StateDict | None:
        attachment = attachment_of(engine)
        # A tensor-parallel model needs a second gather, which upstream knows.
        if (
            attachment is None
            or attachment.runtime.store is None
            or not engine.zero_optimization_partition_weights()
            or engine.autotp_size() > 1
        ):
            return original(engine, exclude_frozen_parameters)
        _partition_all(engine.optimizer)
        entries = list(_entries(engine.module, exclude_frozen_parameters))
        return _consolidate(entries, attachment)

    return consolidate


def _entries(module: torch.nn.Module, exclude_frozen: bool) -> Iterator[_Entry]:
    """Every name of the state dict, in upstream's order: by module, parameters before buffers."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in part.named_parameters(recurse=False):
            if param.requires_grad or not exclude_frozen:
                yield _Entry(dot + name, param, is_parameter=True)
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield _Entry(dot + name, buffer, is_parameter=False)


def _partition_all(optimizer: Any) -> None:
    """Lets go what is gathered, as upstream does before; of an optimizer, or what stands for it."""
    for name in ("_partition_all_parameters", "partition_all_parameters"):
        if hasattr(optimizer, name):
            getattr(optimizer, name)()
            return


def _consolidate(entries: list[_Entry], attachment: Attachment) -> StateDict | None:
    """Called by every rank; gives the state dict on rank 0."""
    weights = {id(entry.tensor): entry.tensor for entry in entries if entry.is_parameter}
    runtime = attachment.runtime
    file: WeightFile | None = None
    error: OSError | None = None
    is_first = dist.get_rank() == 0
    try:
        if is_first:
            shapes = {number: (_shape(param), param.dtype) for number, param in weights.items()}
            try:
                file = WeightFile(runtime.directory, shapes)
            except OSError as reason:
                error = reason
        _raise_together(error)
        for number, param in weights.items():
            with deepspeed.zero.GatheredParameters([param]):
                if file is not None and error is None:
                    try:
                        file.write(number, param.data, runtime.staging)
                    except OSError as reason:
                        error = reason  # the other ranks are in the next gather already
        mapped = {}
        if file is not None and error is None:
            try:
                mapped = file.map()
            except OSError as reason:
                error = reason
        _raise_together(error)
    finally:
        if file is not None:
            file.close()
    if file is None:
        return None
    log.info(
        "memascend: the consolidated weights are a file of %s in %s, not host memory",
        format_nbytes(file.nbytes),
        runtime.directory,
    )
    return OrderedDict(
        (entry.key, mapped[id(entry.tensor)] if entry.is_parameter else entry.tensor.detach().cpu())
        for entry in entries
    )


def _raise_together(error: OSError | None) -> None:
    """Raises rank 0's error there and another one on every other rank: none waits for ever."""
    failed = torch.tensor([error is not None], dtype=torch.int32)
    failed = failed.to(get_accelerator().current_device_name())
    dist.broadcast(failed, src=0)
    if error is not None:
        raise error
    if failed.item():
        raise StoreError(errno.EIO, "rank 0 could not write the consolidated weights; see its log")


def _shape(param: Any) -> torch.Size:
    shape: torch.Size = getattr(param, "ds_shape", param.shape)
    return shape


class WeightFile:
    """An unnamed file with room for tensors, which are written one by one and then mapped."""

    def __init__(self, directory: str, shapes: dict[int, tuple[torch.Size, torch.dtype]]) -> None:
        """Takes the space on the drive now.

        Args:
            directory: Where the file is made; it never has a name there.
            shapes: Shape and dtype of each tensor, by any number.

        Raises:
            StoreFullError: There is too little space.
            OSError: The directory cannot be written.
        """
        self._shapes = shapes
        self._offsets: dict[int, int] = {}
        self.nbytes = 0
        for number, (shape, dtype) in shapes.items():
            self._offsets[number] = self.nbytes
            nbytes = shape.numel() * dtype.itemsize
            self.nbytes += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._flushed = 0
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        try:
            if self.nbytes:
                os.posix_fallocate(self._file.fileno(), 0, self.nbytes)
        except OSError as error:
            self._file.close()
            raise StoreFullError(
                error.errno or 0,
                f"saving the consolidated 16-bit weights needs {format_nbytes(self.nbytes)} of "
                f"free space in {directory}: {error.strerror}\nlikely cause: the drive is full\n"
                "fix: free space there, or save a checkpoint instead "
                '("stage3_gather_16bit_weights_on_model_save": false)',
            ) from error

    def write(self, number: int, tensor: torch.Tensor, staging: StagingSlots) -> None:
        """Writes one tensor of any device, through a staging slot where that is not the host."""
        flat = tensor.detach().contiguous().view(-1)
        itemsize = flat.element_size()
        offset = self._offsets[number]
        for begin, count in staging.chunks(flat.numel(), itemsize):
            piece = flat.narrow(0, begin, count)
            if piece.device.type == "cpu":
                self._write(piece, offset + begin * itemsize)
                continue
            staged = staging.take(count, piece.dtype)
            try:
                staged.copy_(piece)
                self._write(staged, offset + begin * itemsize)
            finally:
                staging.give_back(staged)

    def map(self) -> dict[int, torch.Tensor]:
        """All tensors; together they keep the file."""
        self._flush(self.nbytes)
        memory = mmap.mmap(self._file.fileno(), self.nbytes) if self.nbytes else b""
        found = {}
        for number, (shape, dtype) in self._shapes.items():
            numel, offset = shape.numel(), self._offsets[number]
            if numel:
                flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
                found[number] = flat.view(shape)
            else:
                found[number] = torch.empty(shape, dtype=dtype)
        return found

    def close(self) -> None:
        """Closes the file; what was mapped stays."""
        self._file.close()

    def _write(self, piece: torch.Tensor, offset: int) -> None:
        memory = memoryview((ctypes.c_char * piece.nbytes).from_address(piece.data_ptr()))
        done = 0
        while done < piece.nbytes:
            done += os.pwrite(self._file.fileno(), memory[done:], offset + done)
        if offset + done - self._flushed >= FLUSH_BYTES:
            self._flush(offset + done)

    def _flush(self, end: int) -> None:
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(
            self._file.fileno(), self._flushed, end - self._flushed, os.POSIX_FADV_DONTNEED
        )
        self._flushed = end
