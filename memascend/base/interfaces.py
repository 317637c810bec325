"""The interfaces between layers that pass tensors: memory, its registrar, transfers, events.

A lower layer implements them, a higher one uses them, and neither imports the other for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

#: Makes a block in which a stream of the device is the current one.
OnStream = Callable[[], AbstractContextManager[object]]
#: Makes such a stream.
NewStream = Callable[[], OnStream]


class HostMemory(Protocol):
    """Gives host tensors; the memory goes back when the last view of a tensor is gone."""

    def tensor(
        self, numel: int, dtype: torch.dtype, *, component: str, zero: bool = False
    ) -> torch.Tensor:
        """Return a 1-D CPU tensor of `numel` elements, contents undefined unless `zero`."""

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory came from here."""


class Registrar(Protocol):
    """Page-locks host memory for a device.

    Called while an allocator grows or shrinks, by any thread, and may free memory of it but not
    take any. Each call returns an empty text when it worked, else what failed.
    """

    def register(self, address: int, nbytes: int, /) -> str:
        """Register a range as a whole, or not at all."""

    def unregister(self, address: int, nbytes: int, /) -> str:
        """Take back a range that was registered."""

    def unregister_when_idle(self, address: int, nbytes: int, /) -> str:
        """Do so once the device is idle, as a copy may still be in flight."""


class Ticket(Protocol):
    """A transfer in flight, to wait on."""

    def wait(self) -> None:
        """Return when the transfer has finished; raise StoreError when it failed."""

    def done(self) -> bool:
        """Return whether it has finished."""


class Event(Protocol):
    """A mark in a device's stream, recorded behind a copy."""

    def record(self) -> None:
        """Place the event behind everything issued on the current stream."""

    def query(self) -> bool:
        """Return whether everything before the event has finished."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def wait(self) -> None:
        """Have what is issued on the current stream from now on wait until it has."""


class TensorIO(Protocol):
    """Reads and writes tensors by key, whole or in parts."""

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Find room for a key of this size; raise StoreFullError when there is none."""

    def read(
        self,
        *,
        key: str,
        target: torch.Tensor,
        offset_bytes: int = 0,
        hold: object | None = None,
        capacity_bytes: int = 0,
    ) -> Ticket:
        """Start filling `target` from `offset_bytes` of the key on.

        Of `capacity_bytes` from its first byte on all may be overwritten; 0: no more than itself.
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
        """Start storing `source` into the key from `offset_bytes` on; None: as the whole key.

        Of `capacity_bytes` from its first byte on all may be read; 0: no more than itself.
        """

    def discard(self, *, key: str) -> bool:
        """Forget a key; False when there is none."""

    def wait_all(self) -> None:
        """Return when nothing is in flight; tickets keep their errors."""


class Lender(Protocol):
    """Has the bytes of some keys in memory, and lends that memory to be read."""

    def lends(self, *, key: str, dtype: torch.dtype) -> bool:
        """Return whether all of a key is in memory, where elements of this type may be."""

    def lend(self, *, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return that memory; until it is taken back the key is neither written nor given up."""

    def take_back(self, *, key: str) -> None:
        """End the loan of a key, if there is one."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device as host memory sees it.

    Attributes:
        registers: Whether memory should be registered with it: it copies by itself.
        registrar: Who registers memory; None for CUDA's driver.
        pci_address: For the choice of a NUMA node; None where it is not known.
        new_event: Makes an event of it; None where copies are over on return.
        wait_idle: Waits until it has nothing to do; None where copies are over on return.
        new_stream: Makes a stream, and returns what makes it the current one of a block; None where
            there are none.
        use_here: Makes it the current device of the calling thread. A new thread has device 0, and
            a rank with another one would get a second context there, of half a GiB.
    """

    registers: bool = False
    registrar: Registrar | None = None
    pci_address: str | None = None
    new_event: Callable[[], Event] | None = None
    wait_idle: Callable[[], object] | None = None
    new_stream: NewStream | None = None
    use_here: Callable[[], object] = int
