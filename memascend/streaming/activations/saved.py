"""All saved storages of one stream: their queues, and their bytes by place.

Knows records. Call with the stream's lock held. Every number and every queue that depends on a
state changes in `Saved.change`, and no call looks at all records.
"""

from __future__ import annotations

from collections import deque
from itertools import count

import torch

from memascend.base.interfaces import Event
from memascend.ledger.traffic import ActivationTraffic
from memascend.streaming.activations.records import (
    AHEAD,
    HELD,
    OFF_DEVICE,
    Act,
    Activation,
    Record,
    State,
    state_after,
)
from memascend.streaming.activations.stack import SavedStack


class Saved:
    """The records of saved storages.

    Attributes:
        held_bytes: Bytes in the states HELD.
        ahead_bytes: Bytes in the states AHEAD.
        device_bytes: Bytes on the device.
        records: Records by number, in the order of saving.
        waiting: Those that may be written, the oldest first.
        reads: Those to be read, the most urgent first.
        dropped: Those whose handle is garbage. Handles add to it without the lock.
        stack: Their order and sizes.
    """

    def __init__(self, traffic: ActivationTraffic) -> None:
        """Begin with none.

        Args:
            traffic: Receives the number of storages, their bytes, and the peak on the device.
        """
        self.held_bytes = self.ahead_bytes = self.device_bytes = 0
        self.records: dict[int, Record] = {}
        self.waiting: dict[int, Record] = {}
        self.reads: deque[Record] = deque()
        self.dropped: deque[Record] = deque()
        self.stack = SavedStack()
        self._numbers = count()
        self._traffic = traffic

    def add(self, tensor: torch.Tensor, filled: Event | None) -> Activation:
        """Add the storage of a tensor, to be written; return its handle."""
        record = Record(next(self._numbers), tensor, filled)
        # First: after Ctrl-C every noted record has an Activation that gives it up.
        activation = Activation(record, self.dropped)
        self.records[record.number] = record
        self.stack.push(record.number, record.nbytes)
        self.change(record, Act.SAVE)
        self._traffic.count += 1
        self._traffic.saved_bytes += record.nbytes
        return activation

    def change(self, record: Record, act: Act) -> None:
        """Change the state of a record, with all that is counted and queued by it.

        Raises:
            AssertionError: The act is impossible in this state.
        """
        old, new = record.state, state_after(record.state, act)
        # Ctrl-C may come between any two lines: a queued record always has the state for it.
        if new is not State.WAITING:
            self.waiting.pop(record.number, None)
        if new is not State.STORED:
            self.stack.leave_out(record.number)
        held_bytes = self.held_bytes + ((new in HELD) - (old in HELD)) * record.nbytes
        ahead_bytes = self.ahead_bytes + ((new in AHEAD) - (old in AHEAD)) * record.nbytes
        device_bytes = self.device_bytes + (_is_on_device(new) - _is_on_device(old)) * record.nbytes
        self.held_bytes, self.ahead_bytes, self.device_bytes, record.state = (
            held_bytes,
            ahead_bytes,
            device_bytes,
            new,
        )
        if new is State.WAITING:
            self.waiting[record.number] = record
        if new is State.STORED and not record.was_taken:
            self.stack.prefetch(record.number)
        if new in OFF_DEVICE:
            record.drop_data()
        self._traffic.device_bytes_peak = max(self._traffic.device_bytes_peak, device_bytes)

    def read_first(self, record: Record) -> None:
        """Move a record to the front of the reads."""
        self.reads = deque([record, *(one for one in self.reads if one is not record)])

    def remove(self, record: Record) -> None:
        """Give up a record; no effect if it is unknown."""
        self.change(record, Act.DROP)
        self.stack.remove(record.number)
        self.records.pop(record.number, None)


def _is_on_device(state: State) -> bool:
    return state is not State.NEW and state not in OFF_DEVICE
