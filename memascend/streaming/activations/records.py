"""Records of storages that were saved for backward, and the handles to them.

Knows torch only. A graph may be dropped at any moment, by any thread and by the garbage collector.
The handle's finalizer then only queues the record; the stream's next call frees its resources.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

import torch

from memascend.base.interfaces import Event


class State(enum.Enum):
    """Where the bytes are."""

    WAITING = enum.auto()  # on the device only
    WRITING = enum.auto()
    STORED = enum.auto()  # on the drive; also on the device while Record.data is set
    READING = enum.auto()


@dataclass(slots=True, eq=False)
class Record:
    """One saved storage. Hold the stream's lock to change it."""

    number: int
    nbytes: int
    saved: torch.Tensor | None  # shares the version counter of in-place operations
    data: torch.Tensor | None  # all bytes, on the device
    filled: Event | None  # passes when they are filled
    device: torch.device
    version: int
    stream: torch.Stream | None = None  # on which the target of a read was allocated
    state: State = State.WAITING
    is_held: bool = False  # counted as held
    is_ahead: bool = False  # counted as read ahead
    is_on_device: bool = False  # counted as on the device
    is_taken: bool = False
    was_taken: bool = False  # not prefetched again
    error: Exception | None = None  # of a read, not raised yet

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"activation.{self.number}"

    def let_go(self) -> None:
        """Drop the references to the bytes on the device."""
        self.data = self.saved = None

    def is_modified(self) -> bool:
        """Return whether the storage was modified in place since it was saved."""
        return self.saved is not None and self.saved._version != self.version

    def check_version(self) -> None:
        """Raise autograd's error if the saved tensor was modified in place.

        Raises:
            RuntimeError: The storage was modified in place since it was saved.
        """
        if self.is_modified():
            assert self.saved is not None
            raise modified_error(self.saved, self.version)


class Activation:
    """Handle of a saved storage. The storage is given up when the handle is garbage."""

    __slots__ = ("__weakref__", "_dropped", "record")

    def __init__(self, record: Record, dropped: deque[Record]) -> None:
        self.record = record
        self._dropped = dropped

    def __del__(self) -> None:
        # No lock: the garbage collector may run while this thread holds the stream's lock.
        if self.record.state is State.WAITING:
            self.record.data = self.record.saved = None
        self._dropped.append(self.record)


def modified_error(tensor: torch.Tensor, version: int) -> RuntimeError:
    """Return autograd's error for a saved tensor that was modified in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {tensor.dtype} of shape {list(tensor.shape)} is at version "
        f"{tensor._version}; expected version {version} instead. fix: make the operation out of "
        "place, or let it work on a clone"
    )
