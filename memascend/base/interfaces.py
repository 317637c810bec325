"""The interfaces between layers that pass tensors: memory, its registrar, transfers, events.

A lower layer implements them, a higher one uses them, and neither imports the other. The surface of
host memory and stores is written here once, over a few methods that each kind implements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

#: Returns a context manager in which a stream of the device is the current stream.
OnStream = Callable[[], AbstractContextManager[object]]
#: Creates such a stream.
NewStream = Callable[[], OnStream]


class HostMemory(ABC):
    """Allocates host tensors; the memory is freed with the last view of a tensor."""

    def tensor(
        self, numel: int, dtype: torch.dtype, *, component: str, zero: bool = False
    ) -> torch.Tensor:
        """Return a 1-D CPU tensor of `numel` elements, contents undefined unless `zero`.

        Raises:
            HostMemoryError: The limit or the system refuses the memory.
        """
        import torch

        if numel == 0:  # on the CPU by name: inside zero.Init torch makes device tensors
            return torch.empty(0, dtype=dtype, device="cpu")
        return self.allocate(numel * dtype.itemsize, component=component, zero=zero).view(dtype)

    @abstractmethod
    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        """Return `nbytes` bytes, at least 1, as a 1-D tensor of uint8."""

    @abstractmethod
    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory was allocated here."""


class Registrar(Protocol):
    """Page-locks host memory for a device.

    Called while an allocator grows or shrinks, by any thread. A call may free memory of that
    allocator but not allocate any. It returns an empty text on success, else the error.
    """

    def register(self, address: int, nbytes: int, /) -> str:
        """Register a range as a whole, or not at all."""

    def unregister(self, address: int, nbytes: int, /) -> str:
        """Unregister a registered range."""

    def unregister_when_idle(self, address: int, nbytes: int, /) -> str:
        """Unregister once the device is idle, since a copy may still be in flight."""


class Ticket(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Wait until the transfer has finished; raise StoreError if it failed."""

    def done(self) -> bool:
        """Return whether the transfer has finished."""


class Event(Protocol):
    """A mark in a device's stream, recorded behind a copy."""

    def record(self) -> None:
        """Place the event behind everything issued on the current stream."""

    def query(self) -> bool:
        """Return whether everything before the event has finished."""

    def synchronize(self) -> None:
        """Block the host until everything before the event has finished."""

    def wait(self) -> None:
        """Make later work on the current stream wait until the event has passed."""


class TensorRequest(NamedTuple):
    """One read or write, with arguments that are checked."""

    key: str  # name in the store
    tensor: torch.Tensor  # contiguous CPU tensor to read into or write from
    offset_bytes: int | None  # offset in the key; None for a write of the whole key
    hold: object | None  # object to keep alive until the transfer is over, besides the tensor
    #: Bytes from the tensor's first byte on that may be used, 0: as the tensor. With more than the
    #: tensor an odd tail needs no bounce buffer.
    capacity_bytes: int

    @property
    def begin(self) -> int:
        """Offset in the key of the first byte."""
        return self.offset_bytes or 0

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.tensor.nbytes

    @property
    def data(self) -> torch.Tensor:
        """Bytes of the tensor, sharing its memory."""
        import torch

        return self.tensor.detach().view(-1).view(torch.uint8)

    def without(self, count: int) -> TensorRequest:
        """Return the request for all but the first `count` bytes."""
        hold = (self.tensor, self.hold)
        return TensorRequest(self.key, self.data[count:], self.begin + count, hold, 0)


class TensorIO(ABC):
    """Reads and writes tensors by key, whole or in parts.

    Transfers on one key keep their order where they overlap and one of them writes. Arguments are
    checked in `read` and `write`; a store implements `start_read` and `start_write`.
    """

    def read(
        self,
        *,
        key: str,
        target: torch.Tensor,
        offset_bytes: int = 0,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Start reading into a tensor, from `offset_bytes` of the key on.

        The tensor must not be used until the ticket is done. It gets the bytes of every write
        started before. `TensorRequest` explains the arguments.

        Raises:
            StoreError: No such key, or an earlier write of it failed.
            ValueError: Not a contiguous CPU tensor, or outside the key.
        """
        request = TensorRequest(key, target, offset_bytes, hold, capacity_bytes)
        return self.start_read(_checked(request))

    def write(
        self,
        *,
        key: str,
        source: torch.Tensor,
        offset_bytes: int | None = None,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Start writing a tensor, as the whole key or into a key from `offset_bytes` on.

        The tensor's bytes are kept alive, and must not change, until the ticket is done.
        `TensorRequest` explains the arguments.

        Raises:
            StoreFullError: No space for the key.
            ValueError: Not a contiguous CPU tensor, or outside the key.
        """
        request = TensorRequest(key, source, offset_bytes, hold, capacity_bytes)
        return self.start_write(_checked(request))

    @abstractmethod
    def start_read(self, request: TensorRequest) -> Ticket:
        """Start a read."""

    @abstractmethod
    def start_write(self, request: TensorRequest) -> Ticket:
        """Start a write."""

    @abstractmethod
    def reserve(self, *, key: str, nbytes: int) -> None:
        """Reserve space for a key, so that no later write can find the disk full.

        Raises:
            StoreFullError: There is not enough space; nothing was changed.
        """

    @abstractmethod
    def discard(self, *, key: str) -> bool:
        """Remove a key once its transfers have finished; False if there is none."""

    @abstractmethod
    def wait_all(self) -> None:
        """Return when nothing is in flight; tickets keep their errors."""


def contiguous_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged; raise ValueError if it is not a contiguous CPU tensor."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"the store moves contiguous CPU tensors, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}; call .contiguous() or copy it to the host first"
        )
    return tensor


def _checked(request: TensorRequest) -> TensorRequest:
    contiguous_cpu(request.tensor)
    if request.begin < 0:
        raise ValueError(
            f"bytes {request.begin} to {request.begin}+{request.nbytes} are not all in "
            f'"{request.key}", which begins at 0'
        )
    return request


class Lender(Protocol):
    """Lends the memory of keys that are in host memory, for reading."""

    def lends(self, *, key: str, dtype: torch.dtype) -> bool:
        """Return whether a key is in memory as a whole, aligned for elements of this type."""

    def lend(self, *, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return that memory; until `take_back` the key is neither written nor discarded."""

    def take_back(self, *, key: str) -> None:
        """End the loan of a key, if there is one."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device as host memory uses it."""

    name: str = "cpu"  # its name in torch
    registers: bool = False  # whether to register host memory, so that copies are asynchronous
    registrar: Registrar | None = None  # registers memory; None: CUDA's driver does
    pci_address: str | None = None  # selects the NUMA node; None if it is not known
    new_event: Callable[[], Event] | None = None  # makes an event; None if copies are synchronous
    wait_idle: Callable[[], object] | None = None  # None if copies are synchronous
    #: Makes a stream; returns a function whose contexts make it the current one. None if there are
    #: no streams.
    new_stream: NewStream | None = None
    #: Makes it the current device of the calling thread. A new thread has device 0; a rank with
    #: another device would get a second context there, of half a GiB.
    use_here: Callable[[], object] = int
