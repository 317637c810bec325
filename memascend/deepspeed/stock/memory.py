"""Stock DeepSpeed's own memory and file I/O behind our interfaces, for sections that are off.

So an ablation is one config key: `allocator.enabled: false` uses the accelerator's pinned memory,
`direct_nvme.enabled: false` reads and writes a file per tensor through DeepSpeed's libaio engine.
Both keep stock's properties, such as power-of-two rounding and unchecked transfer results.
"""

from __future__ import annotations

import os
import shutil
import weakref
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from memascend.base.interfaces import HostMemory, TensorIO, TensorRequest, Ticket
from memascend.base.units import PAGE_BYTES, page_up
from memascend.base.waiting import Ended


class PinnedMemory(HostMemory):
    """Host tensors from the accelerator's pin_memory (torch's caching host allocator on CUDA)."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        """Return pinned memory that starts at a page; `component` is ignored."""
        # device="cpu", since inside zero.Init torch's factory functions make device tensors.
        make = torch.zeros if zero else torch.empty
        pageable = make(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
        pinned: torch.Tensor = get_accelerator().pin_memory(pageable)
        address = pinned.data_ptr()
        self._ranges[address] = address + pinned.nbytes
        weakref.finalize(pinned.untyped_storage(), self._ranges.pop, address, None)
        skipped = page_up(address) - address  # torch aligns to 64 bytes on CPU, to pages on CUDA
        return pinned[skipped : skipped + nbytes]

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in memory allocated here."""
        address = tensor.data_ptr()
        return any(begin <= address < end for begin, end in self._ranges.items())


class LockedMemory(HostMemory):
    """Host tensors from DeepSpeed's aio handle: page-locked and registered with it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        """Return locked memory; the handle's registry keeps it until the process ends."""
        locked: torch.Tensor = self._handle.new_cpu_locked_tensor(nbytes, torch.empty(0).byte())
        return locked.zero_() if zero else locked

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether DeepSpeed's aio handle has allocated the tensor."""
        return bool(self._handle.is_pinned(tensor))


class AioFileTicket:
    """Waits for all transfers of its store: DeepSpeed's engine cannot wait for one."""

    def __init__(self, store: AioFileStore) -> None:
        self._store = store
        self._finished = False
        self._error: OSError | None = None

    def wait(self) -> None:
        """Wait until the transfer has finished.

        An OSError says that fewer transfers of its batch completed than were started; the engine
        reports no other failure.
        """
        if not self._finished:
            self._store.wait_all()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return whether it has finished, as far as a wait has found out."""
        return self._finished

    def finish(self, error: OSError | None = None) -> None:
        """Mark it as finished; the store calls this, with the error of its batch if any."""
        self._finished = True
        self._error = error


def _remove_own(folder: str, process: int) -> None:
    """Remove the folder, but not in a forked child: the parent still uses the files."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


class AioFileStore(TensorIO):
    """A file per key in a folder of this run, through DeepSpeed's aio handle."""

    def __init__(self, handle: Any, folder: str) -> None:
        self._handle = handle
        self._folder = folder
        self._pending: list[tuple[AioFileTicket, torch.Tensor, object]] = []
        os.makedirs(folder, exist_ok=True)
        weakref.finalize(self, _remove_own, folder, os.getpid())

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Reserve nothing: a file grows as it is written."""

    def discard(self, *, key: str) -> bool:
        """Remove a key's file; False when there is none."""
        self.wait_all()
        known = os.path.exists(self._path(key))
        if known:
            os.unlink(self._path(key))
        return known

    def start_read(self, request: TensorRequest) -> Ticket:
        """Start filling a tensor; if the handle did not allocate it, it is filled on return."""
        _expect_whole(request)
        self.wait_all()  # the engine does not order a read after a write of the file
        padded = _padded(request.data)
        if padded is None or not self._handle.is_pinned(request.tensor):
            bounce = self._handle.new_cpu_locked_tensor(
                page_up(request.nbytes), torch.empty(0).byte()
            )
            self._handle.sync_pread(bounce, self._path(request.key), 0)
            request.data.copy_(bounce[: request.nbytes])
            self._handle.free_cpu_locked_tensor(bounce)
            return Ended()
        self._handle.async_pread(padded, self._path(request.key), 0)
        return self._submitted(padded, request.hold)

    def start_write(self, request: TensorRequest) -> AioFileTicket:
        """Start storing a tensor, which must be a slot of the pool."""
        _expect_whole(request)
        self.wait_all()  # the engine does not order a write after an earlier transfer of the file
        padded = _padded(request.data)
        if padded is None:
            raise ValueError(f"{request.key}: {request.nbytes} bytes cannot be padded to pages")
        self._handle.async_pwrite(padded, self._path(request.key), 0)
        return self._submitted(padded, request.hold)

    def wait_all(self) -> None:
        """Wait for every transfer."""
        pending, self._pending = self._pending, []
        if pending:
            completed = self._handle.wait()
            error = None
            if completed != len(pending):
                error = OSError(
                    f"{self._folder}: {completed} of {len(pending)} transfers completed"
                )
            for ticket, _, _ in pending:
                ticket.finish(error)
            if error is not None:
                raise error

    def _submitted(self, tensor: torch.Tensor, hold: object | None) -> AioFileTicket:
        ticket = AioFileTicket(self)
        self._pending.append((ticket, tensor, hold))
        return ticket

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, f"{key}.tensor.swp")


def _expect_whole(request: TensorRequest) -> None:
    if request.begin:
        raise ValueError(
            f"{request.key}: cannot start at byte {request.begin}: DeepSpeed's engine transfers "
            "only whole keys here. fix: leave memascend.direct_nvme on where parts of keys are "
            "needed"
        )


def _padded(data: torch.Tensor) -> torch.Tensor | None:
    """Return the same bytes extended to whole pages; None if the storage is too small."""
    nbytes, begin = page_up(data.nbytes), data.storage_offset()
    if begin + nbytes > data.untyped_storage().nbytes():
        return None
    return data.as_strided((nbytes,), (1,), begin)
