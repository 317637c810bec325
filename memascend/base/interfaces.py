"""The interfaces between layers that pass tensors: memory, slots, transfers, events.

A lower layer implements them, a higher one uses them, and neither imports the other for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class HostMemory(Protocol):
    """Gives host tensors; the memory goes back when the last view of a tensor is gone."""

    def tensor(
        self, numel: int, dtype: torch.dtype, *, component: str, zero: bool = False
    ) -> torch.Tensor:
        """A 1-D CPU tensor of `numel` elements, contents undefined unless `zero`."""

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory came from here."""


class Ticket(Protocol):
    """What you wait on for a group of requests."""

    def wait(self) -> None:
        """Returns when the transfer has finished; raises StoreError when it failed."""

    def done(self) -> bool:
        """Whether it has finished."""


class Event(Protocol):
    """What a device stream offers: something recorded behind a copy."""

    def record(self) -> None:
        """Places the event behind everything issued on the current stream."""

    def query(self) -> bool:
        """Whether everything before the event has finished."""

    def synchronize(self) -> None:
        """Waits until it has."""


class Lease(Protocol):
    """The exclusive right to a slot."""

    @property
    def slot_bytes(self) -> int:
        """Size of the slot."""

    def hold(self) -> object:
        """Something that keeps the slot from being reused while it lives; transfers carry one."""

    def release(self) -> None:
        """Gives the slot back, as soon as no transfer holds it."""


class SlotPool(Protocol):
    """Size classes of slots."""

    def acquire(self, nbytes: int) -> Lease | None:
        """A lease of the class for `nbytes`, or None when its slots are all taken."""

    def grow(self, nbytes: int) -> None:
        """Adds a slot to the class for `nbytes`, making the class when it is new."""

    def view(self, lease: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of the slot; the tensor keeps the lease alive."""


class TensorIO(Protocol):
    """Reads and writes tensors by key."""

    def read(self, *, key: str, target: torch.Tensor, hold: object | None = None) -> Ticket:
        """Starts filling `target`."""

    def write(self, *, key: str, source: torch.Tensor, hold: object | None = None) -> Ticket:
        """Starts storing `source`."""


class RangeIO(Protocol):
    """Reads and writes parts of keys."""

    def reserve(self, *, key: str, nbytes: int) -> None:
        """Finds room for a key of this size; raises StoreFullError when there is none."""

    def read(
        self,
        *,
        key: str,
        target: torch.Tensor,
        offset_bytes: int = 0,
        hold: object | None = None,
    ) -> Ticket:
        """Starts filling `target` from `offset_bytes` of the key on."""

    def write(
        self,
        *,
        key: str,
        source: torch.Tensor,
        offset_bytes: int | None = None,
        hold: object | None = None,
    ) -> Ticket:
        """Starts storing `source` into the key from `offset_bytes` on; None: as the whole key."""

    def discard(self, *, key: str) -> bool:
        """Forgets a key; False when there is none."""
