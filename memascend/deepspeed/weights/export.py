"""The whole 16-bit model for saving, in a file on the drive instead of in host memory.

DeepSpeed's `save_16bit_model`, accelerate's `get_state_dict` and the Trainer's `save_model` get a
consolidated state dict from the engine on rank 0: two bytes for every parameter. Here each
parameter is gathered, written to an unnamed file below `nvme_path` and released; the tensors of the
dict map that file. The kernel can drop its pages, and its space is freed with the dict.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.base.progress import byte_progress
from memascend.base.units import format_nbytes
from memascend.checkpoint.files import FlushedFile
from memascend.deepspeed.attach.agreement import all_or_none
from memascend.deepspeed.attach.attachment import Attachment, attachment_of
from memascend.errors import CheckpointError, StoreError, StoreFullError
from memascend.transfer.staging import StagingSlots

log = logging.getLogger(__name__)

StateDict = OrderedDict[str, torch.Tensor]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _NamedTensor:
    """One name of the state dict: a parameter, or a buffer."""

    key: str
    tensor: Any
    is_parameter: bool


def wrap_consolidate(original: Callable[..., StateDict | None]) -> Callable[..., Any]:
    """Replace DeepSpeedEngine._zero3_consolidated_16bit_state_dict for engines with a block."""

    @functools.wraps(original)
    def consolidate(engine: Any, exclude_frozen_parameters: bool = False) -> StateDict | None:
        attachment = attachment_of(engine)
        # A tensor-parallel model needs a second gather, which only upstream does.
        if (
            attachment is None
            or not attachment.runtime.drive.is_ours
            or not engine.zero_optimization_partition_weights()
            or engine.autotp_size() > 1
        ):
            return original(engine, exclude_frozen_parameters)
        _partition_all(engine.optimizer)
        _check_values(engine.optimizer)
        tensors = list(_named_tensors(engine.module, exclude_frozen_parameters))
        return _consolidate(tensors, attachment)

    return consolidate


def _named_tensors(module: torch.nn.Module, exclude_frozen: bool) -> Iterator[_NamedTensor]:
    """Yield every name of the state dict in upstream's order: by module, parameters first."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in part.named_parameters(recurse=False):
            if param.requires_grad or not exclude_frozen:
                yield _NamedTensor(dot + name, param, is_parameter=True)
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield _NamedTensor(dot + name, buffer, is_parameter=False)


def _partition_all(optimizer: Any) -> None:
    """Release gathered parameters, as upstream does first; inference has another method name."""
    for name in ("_partition_all_parameters", "partition_all_parameters"):
        if hasattr(optimizer, name):
            getattr(optimizer, name)()
            return


def _check_values(optimizer: Any) -> None:
    """Refuse values of which some are new and others old or undefined; all ranks call this.

    Raises:
        TornStepError: A step or a load ended half-way on this rank.
        CheckpointError: It did on another one.
    """
    steps = getattr(optimizer, "steps", None)
    if steps is not None:
        with all_or_none(_torn_elsewhere):
            steps.finish()
            steps.current.check()


def _torn_elsewhere(ranks: str) -> CheckpointError:
    return CheckpointError(
        f"the 16-bit model cannot be saved: a step or a load ended half-way on another rank "
        f"({ranks}), whose error has the cause and the fix"
    )


def _consolidate(tensors: list[_NamedTensor], attachment: Attachment) -> StateDict | None:
    """Gather and write every parameter, on all ranks; return the state dict on rank 0."""
    weights = {id(named.tensor): named.tensor for named in tensors if named.is_parameter}
    runtime = attachment.runtime
    is_first = dist.get_rank() == 0
    errors: list[OSError] = []

    def attempt(action: Callable[..., Result], *arguments: Any) -> Result | None:
        """Keep an error for later: the other ranks are already in the next gather."""
        try:
            return action(*arguments) if is_first and not errors else None
        except OSError as error:
            errors.append(error)
            return None

    shapes = {
        number: (getattr(param, "ds_shape", param.shape), getattr(param, "ds_tensor", param).dtype)
        for number, param in weights.items()
    }
    file = attempt(WeightFile, runtime.directory, shapes)
    try:
        _raise_everywhere(errors)
        nbytes = 0 if file is None else file.nbytes
        with byte_progress("writing the 16-bit model", nbytes, leads=is_first) as advance:
            for number, param in weights.items():
                with deepspeed.zero.GatheredParameters([param]):
                    if file is not None:
                        with runtime.lock:
                            attempt(file.write_tensor, number, param.data, runtime.staging)
                        advance(param.data.nbytes)
        mapped = attempt(file.map) if file is not None else None
        _raise_everywhere(errors)
    finally:
        if file is not None:
            file.close()
    if file is None or mapped is None:
        return None
    log.info(
        "memascend: the consolidated weights are a file of %s in %s, not host memory",
        format_nbytes(file.nbytes),
        runtime.directory,
    )
    return OrderedDict(
        (named.key, mapped[id(named.tensor)] if named.is_parameter else named.tensor.detach().cpu())
        for named in tensors
    )


def _raise_everywhere(errors: list[OSError]) -> None:
    """Raise rank 0's first error on rank 0, and another on all others, so that none waits on."""
    failed = torch.tensor([bool(errors)], dtype=torch.int32)
    failed = failed.to(get_accelerator().current_device_name())
    dist.broadcast(failed, src=0)
    if errors:
        raise errors[0]
    if failed.item():
        raise StoreError(errno.EIO, "rank 0 could not write the consolidated weights; see its log")


class WeightFile(FlushedFile):
    """An unnamed file with room for tensors, which are written one by one and then mapped."""

    def __init__(self, directory: str, shapes: dict[int, tuple[torch.Size, torch.dtype]]) -> None:
        """Allocate the space on the drive.

        Args:
            directory: The folder of the file, which has no name there.
            shapes: (shape, dtype) of each tensor, by any number.

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
        super().__init__(tempfile.TemporaryFile(dir=directory))  # noqa: SIM115
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

    def write_tensor(self, number: int, tensor: torch.Tensor, staging: StagingSlots) -> None:
        """Write one tensor; from a device it goes through a staging slot."""
        flat = tensor.detach().contiguous().view(-1)
        self._file.seek(self._offsets[number])
        for begin, count in staging.chunks(flat.numel(), flat.element_size()):
            piece = flat.narrow(0, begin, count)
            if piece.device.type == "cpu":
                self.write(piece.view(torch.uint8).numpy())
                continue
            staged = staging.take(count, piece.dtype)
            try:
                staged.copy_(piece)
                self.write(staged.view(torch.uint8).numpy())
            finally:
                staging.give_back(staged)

    def map(self) -> dict[int, torch.Tensor]:
        """Return all tensors, mapped; any of them keeps the file."""
        self.make_durable()
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
        """Close the file; mapped tensors stay valid."""
        self._file.close()
