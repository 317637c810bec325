"""Records of storages that were saved for backward: their states, and the handles to them.

Knows torch only. A graph may be dropped at any moment, by any thread and by the garbage collector.
The handle's finalizer then only queues the record; the stream's next call frees its resources.
"""

from __future__ import annotations

import enum
from collections import deque

import torch

from memascend.base.interfaces import Event


class State(enum.Enum):
    """The place of a storage's bytes, and who uses them."""

    # On the device only.
    NEW = enum.auto()  # not counted yet
    WAITING = enum.auto()  # queued to be written
    STUCK = enum.auto()  # not queued: a write failed, or the storage was modified meanwhile
    TAKEN = enum.auto()  # backward uses it
    # On the device, and being written.
    WRITING = enum.auto()
    WRITING_TAKEN = enum.auto()  # backward uses it
    WRITING_SPENT = enum.auto()  # backward has used it
    # On the drive; also on the device, except STORED and FAILED.
    STORED = enum.auto()
    PREFETCHING = enum.auto()  # being read before backward takes it
    PREFETCHED = enum.auto()
    READING = enum.auto()  # being read, and backward waits for it
    LOADED = enum.auto()  # backward uses it
    FAILED = enum.auto()  # the read failed: the next take raises Record.error
    DROPPED = enum.auto()  # given up


class Act(enum.Enum):
    """An act that changes the state."""

    SAVE = enum.auto()
    TAKE = enum.auto()
    RELEASE = enum.auto()
    START_WRITE = enum.auto()
    END_WRITE = enum.auto()
    FAIL_WRITE = enum.auto()  # or the storage was modified before its end
    START_PREFETCH = enum.auto()
    START_READ = enum.auto()
    END_READ = enum.auto()
    FAIL_READ = enum.auto()
    RAISE = enum.auto()
    DROP = enum.auto()


_ANY_TIME = frozenset(State) - {State.NEW, State.DROPPED}
#: The state after each act, by the state before it. Others are mistakes of ours.
TRANSITIONS = {
    Act.SAVE: {State.NEW: State.WAITING},
    # Several threads may take one storage: taking it again changes nothing.
    Act.TAKE: {
        **{state: state for state in _ANY_TIME - {State.STORED}},
        State.WAITING: State.TAKEN,
        State.STUCK: State.TAKEN,
        State.WRITING: State.WRITING_TAKEN,
        State.WRITING_SPENT: State.WRITING_TAKEN,
        State.PREFETCHING: State.READING,
        State.PREFETCHED: State.LOADED,
    },
    # The first of them that releases it does so for all: they keep references of their own.
    Act.RELEASE: {
        **{state: state for state in _ANY_TIME - {State.PREFETCHING, State.PREFETCHED}},
        State.STUCK: State.WAITING,
        State.TAKEN: State.WAITING,
        State.WRITING_TAKEN: State.WRITING_SPENT,
        State.LOADED: State.STORED,
    },
    Act.START_WRITE: {State.WAITING: State.WRITING},
    Act.END_WRITE: {
        State.WRITING: State.STORED,
        State.WRITING_TAKEN: State.LOADED,
        State.WRITING_SPENT: State.STORED,
    },
    Act.FAIL_WRITE: {
        State.WRITING: State.STUCK,
        State.WRITING_TAKEN: State.TAKEN,
        State.WRITING_SPENT: State.STUCK,
    },
    Act.START_PREFETCH: {State.STORED: State.PREFETCHING},
    Act.START_READ: {State.STORED: State.READING},
    Act.END_READ: {State.PREFETCHING: State.PREFETCHED, State.READING: State.LOADED},
    Act.FAIL_READ: {State.PREFETCHING: State.FAILED, State.READING: State.FAILED},
    Act.RAISE: {State.FAILED: State.STORED},
    Act.DROP: dict.fromkeys(State, State.DROPPED),  # again after Ctrl-C
}
# Tuples: `in` then runs no Python code, at which Ctrl-C could come.
#: Forward waits for room while these states have too many bytes.
HELD = (State.WAITING, State.STUCK, State.WRITING)
#: Bytes within the room for prefetching.
AHEAD = (State.PREFETCHING, State.PREFETCHED)
#: Bytes that nothing but the handle needs.
DEVICE_ONLY = (State.NEW, State.WAITING, State.STUCK, State.TAKEN)
ON_DRIVE = (State.STORED, State.PREFETCHED, State.LOADED)
OFF_DEVICE = (State.STORED, State.FAILED, State.DROPPED)


def state_after(state: State, act: Act) -> State:
    """Return the state after an act.

    Raises:
        AssertionError: The act is impossible in this state.
    """
    after = TRANSITIONS[act].get(state)
    if after is None:
        raise AssertionError(f"{act.name} of a saved activation in the state {state.name}")
    return after


class Record:
    """One saved storage. Hold the stream's lock to change it; `Saved.change` alone sets `state`.

    Attributes:
        number: Its place in the order of saving.
        data: All bytes, on the device; None while they are not there.
        saved: Shares the version counter of in-place operations; None once `data` was let go.
        filled: Passes when the bytes are filled.
        stream: The stream on which the target of a read was allocated.
        was_taken: Whether backward has taken it: it is not prefetched any more.
        error: The error of the last read, in the state FAILED.
    """

    def __init__(self, number: int, tensor: torch.Tensor, filled: Event | None = None) -> None:
        """Create the record of a tensor's storage.

        Args:
            number: Its place in the order of saving.
            tensor: A tensor that autograd saves.
            filled: Passes when its bytes are filled.
        """
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        data.set_(tensor.untyped_storage())
        self.number, self.nbytes, self.device = number, data.nbytes, tensor.device
        self.data: torch.Tensor | None = data
        self.saved: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.filled: Event | None = filled
        self.stream: torch.Stream | None = None
        self.state = State.NEW
        self.was_taken = False
        self.error: Exception | None = None

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"activation.{self.number}"

    def drop_data(self) -> None:
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
        if self.record.state in DEVICE_ONLY:
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
