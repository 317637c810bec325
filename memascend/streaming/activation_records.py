"""What is known of a storage that was saved for backward, and who still has it.

Knows torch only. A graph may be dropped at any moment, by any thread and by the garbage collector:
then only a note is left, and whoever comes next gives back what it held.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

import torch

from memascend.base.interfaces import Event


class State(enum.Enum):
    """Where the bytes are."""

    WAITING = enum.auto()  # on the device alone
    WRITING = enum.auto()
    STORED = enum.auto()  # on the drive; while it has data on the device, too
    READING = enum.auto()


@dataclass(slots=True, eq=False)
class Record:
    """What is known of one storage. Whoever changes it has the stream's lock."""

    number: int
    nbytes: int
    saved: torch.Tensor | None  # shares the version that operations in place count up
    data: torch.Tensor | None  # all bytes, on the device
    filled: Event | None  # behind what fills them
    device: torch.device
    version: int
    stream: torch.Stream | None = None  # on which memory was taken to read it into
    state: State = State.WAITING
    is_held: bool = False  # counted as held
    is_ahead: bool = False  # counted as read ahead
    is_on_device: bool = False  # counted as there
    is_taken: bool = False
    was_taken: bool = False  # so it is not read ahead once more
    error: Exception | None = None  # of a read that nobody was told of

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"activation.{self.number}"

    def let_go(self) -> None:
        """Leave the bytes on the device to those who have them."""
        self.data = self.saved = None

    def is_modified(self) -> bool:
        """Return whether it was modified in place since it was saved."""
        return self.saved is not None and self.saved._version != self.version

    def check_version(self) -> None:
        """Raise what autograd would, had it kept the tensor itself.

        Raises:
            RuntimeError: It was modified in place since it was saved.
        """
        if self.is_modified():
            assert self.saved is not None
            raise modified_error(self.saved, self.version)


class Activation:
    """A storage that was saved. When nobody has this object any more it is given up."""

    __slots__ = ("__weakref__", "_dropped", "record")

    def __init__(self, record: Record, dropped: deque[Record]) -> None:
        self.record = record
        self._dropped = dropped

    def __del__(self) -> None:
        # No lock here: the garbage collector may come while this very thread has it.
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
