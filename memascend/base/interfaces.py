"""The interfaces between layers that pass tensors: memory, its registrar, transfers, events.

A lower layer implements them, a higher one uses them, and neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

#: Returns a context manager in which a stream of the device is the current stream.
OnStream = Callable[[], AbstractContextManager[object]]
#: Creates such a stream.
NewStream = Callable[[], OnStream]


class HostMemory(Protocol):
    """Allocates host tensors; the memory is freed with the last view of a tensor."""

    def tensor(
        self, numel: int, dtype: torch.dtype, *, component: str, zero: bool = False
    ) -> torch.Tensor:
        """Return a 1-D CPU tensor of `numel` elements, contents undefined unless `zero`."""

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


class TensorIO(Protocol):
    """Reads and writes tensors by key, whole or in parts."""

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Reserve space for a key of this size; raise StoreFullError if there is none."""

    def read(
        self,
        *,
        key: str,
        target: torch.Tensor,
        offset_bytes: int = 0,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Start reading into `target`, from `offset_bytes` of the key on.

        With `capacity_bytes`, memory behind `target` may be overwritten: up to so many bytes from
        its first byte on. 0: only `target` itself.
        """

    def write(
        self,
        *,
        key: str,
        source: torch.Tensor,
        offset_bytes: int | None = None,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Start writing `source` into the key from `offset_bytes` on; None: as the whole key.

        With `capacity_bytes`, memory behind `source` may be read: up to so many bytes from its
        first byte on. 0: only `source` itself.
        """

    def discard(self, *, key: str) -> bool:
        """Remove a key; False if there is none."""

    def wait_all(self) -> None:
        """Return when nothing is in flight; tickets keep their errors."""


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
    """One device as host memory uses it.

    Attributes:
        registers: Whether host memory should be registered with it: its copies are asynchronous.
        registrar: Registers memory; None: CUDA's driver does.
        pci_address: Selects the NUMA node; None if it is not known.
        new_event: Makes an event of it; None if copies are synchronous.
        wait_idle: Waits until the device is idle; None if copies are synchronous.
        new_stream: Makes a stream; returns a function whose contexts make it the current one. None
            if there are no streams.
        use_here: Makes it the current device of the calling thread. A new thread has device 0; a
            rank with another device would get a second context there, of half a GiB.
    """

    registers: bool = False
    registrar: Registrar | None = None
    pci_address: str | None = None
    new_event: Callable[[], Event] | None = None
    wait_idle: Callable[[], object] | None = None
    new_stream: NewStream | None = None
    use_here: Callable[[], object] = int
