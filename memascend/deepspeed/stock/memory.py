"""Stock DeepSpeed's own memory and file I/O behind our interfaces, for sections that are off.

With these an ablation is one config key: `allocator.enabled: false` stages in the accelerator's
pinned memory, `direct_nvme.enabled: false` reads and writes a file per tensor through DeepSpeed's
libaio engine. They keep stock's properties, power-of-two rounding and unchecked transfer results
included.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections import defaultdict
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from memascend.base.interfaces import HostMemory

_PAGE_BYTES = 4096


class PinnedMemory:
    """Host tensors from the accelerator's pin_memory (torch's caching host allocator on CUDA)."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}

    def tensor(
        self, numel: int, dtype: torch.dtype, *, component: str, zero: bool = False
    ) -> torch.Tensor:
        """A 1-D pinned tensor, aligned to a page; `component` is not accounted for."""
        nbytes = numel * dtype.itemsize
        # With a device: inside zero.Init torch's factory functions make device tensors.
        make = torch.zeros if zero else torch.empty
        pageable = make(nbytes + _PAGE_BYTES, dtype=torch.uint8, device="cpu")
        pinned: torch.Tensor = get_accelerator().pin_memory(pageable)
        address = pinned.data_ptr()
        self._ranges[address] = address + pinned.nbytes
        weakref.finalize(pinned.untyped_storage(), self._ranges.pop, address, None)
        skipped = _rounded(address) - address  # torch aligns to 64 bytes on CPU, to pages on CUDA
        return pinned[skipped : skipped + nbytes].view(dtype)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in memory that came from here."""
        address = tensor.data_ptr()
        return any(begin <= address < end for begin, end in self._ranges.items())


class LockedMemory:
    """Host tensors from DeepSpeed's aio handle: page-locked, known to its engine."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def tensor(
        self, numel: int, dtype: torch.dtype, *, component: str, zero: bool = False
    ) -> torch.Tensor:
        """A 1-D locked tensor; the handle's registry keeps it until the process ends."""
        locked: torch.Tensor = self._handle.new_cpu_locked_tensor(
            numel, torch.empty(0, dtype=dtype)
        )
        return locked.zero_() if zero else locked

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether DeepSpeed's engine takes the tensor for its own."""
        return bool(self._handle.is_pinned(tensor))


class _SlotToken:
    """Held by a lease and by every transfer on its slot; the slot is free when the last lets go."""

    __slots__ = ("__weakref__",)


class TensorLease:
    """A lease on a slot that is a torch tensor."""

    def __init__(self, slot: torch.Tensor, token: _SlotToken) -> None:
        self.slot = slot
        self._token: _SlotToken | None = token

    @property
    def slot_bytes(self) -> int:
        """Size of the slot."""
        return int(self.slot.nbytes)

    def hold(self) -> object:
        """Keeps the slot from being reused while it lives."""
        return self._token

    def release(self) -> None:
        """Gives the slot back."""
        self._token = None


class TensorSlotPool:
    """Size classes of slots over any HostMemory."""

    def __init__(self, memory: HostMemory, component: str) -> None:
        self._memory = memory
        self._component = component
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def acquire(self, nbytes: int) -> TensorLease | None:
        """A lease of the class for `nbytes`, or None when its slots are all taken."""
        free = self._free[_rounded(nbytes)]
        if not free:
            return None
        slot = free.pop()
        token = _SlotToken()
        weakref.finalize(token, free.append, slot)
        return TensorLease(slot, token)

    def grow(self, nbytes: int) -> None:
        """Adds a slot to the class for `nbytes`."""
        size = _rounded(nbytes)
        slot = self._memory.tensor(size, torch.uint8, component=self._component)
        self._free[size].append(slot)

    def view(self, lease: TensorLease, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of the slot."""
        return lease.slot.view(dtype).narrow(0, 0, numel)


class AioFileTicket:
    """Waits for everything its store has in flight; DeepSpeed's engine offers no less."""

    def __init__(self, store: AioFileStore) -> None:
        self._store = store
        self._finished = False
        self._error: OSError | None = None

    def wait(self) -> None:
        """Waits until the transfer has finished; whether it succeeded the engine does not tell."""
        if not self._finished:
            self._store.wait_all()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether it is known to have finished."""
        return self._finished

    def finish(self, error: OSError | None = None) -> None:
        """Called by the store; with what went wrong with its batch, if anything did."""
        self._finished = True
        self._error = error


class AioFileStore:
    """A file per key in a folder of this run, through DeepSpeed's aio handle."""

    def __init__(self, handle: Any, folder: str) -> None:
        self._handle = handle
        self._folder = folder
        self._pending: list[tuple[AioFileTicket, torch.Tensor, object]] = []
        os.makedirs(folder, exist_ok=True)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def read(self, *, key: str, target: torch.Tensor, hold: object | None = None) -> AioFileTicket:
        """Starts filling `target`; memory the engine does not know is filled before returning."""
        self.wait_all()  # the engine does not order a read behind a write of the file either
        padded = _padded(target)
        if padded is None or not self._handle.is_pinned(target):
            bounce = self._handle.new_cpu_locked_tensor(
                _rounded(target.nbytes), torch.empty(0).byte()
            )
            self._handle.sync_pread(bounce, self._path(key), 0)
            target.copy_(bounce[: target.nbytes].view(target.dtype))
            self._handle.free_cpu_locked_tensor(bounce)
            ticket = AioFileTicket(self)
            ticket.finish()
            return ticket
        self._handle.async_pread(padded, self._path(key), 0)
        return self._submitted(padded, hold)

    def write(self, *, key: str, source: torch.Tensor, hold: object | None = None) -> AioFileTicket:
        """Starts storing `source`, which must be a slot of the pool."""
        self.wait_all()  # the engine does not order a write behind an earlier transfer of the file
        padded = _padded(source)
        if padded is None:
            raise ValueError(f"{key}: {source.nbytes} bytes cannot be padded to whole pages")
        self._handle.async_pwrite(padded, self._path(key), 0)
        return self._submitted(padded, hold)

    def wait_all(self) -> None:
        """Waits for every transfer."""
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


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _padded(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same memory up to whole pages, when the storage reaches that far."""
    numel = _rounded(tensor.nbytes) // tensor.element_size()
    begin = tensor.storage_offset()
    if (begin + numel) * tensor.element_size() > tensor.untyped_storage().nbytes():
        return None
    return tensor.as_strided((numel,), (1,), begin)
