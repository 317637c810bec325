"""Copies of saved storages between the device and the drive, through staging slots.

Knows torch, the store and the slots. One thread at a time may copy; any thread may allocate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from memascend.base.interfaces import Device, Event
from memascend.base.waiting import event_here
from memascend.streaming.activations.records import Record
from memascend.transfer.staging import StagingSlots


class Copies:
    """Reads and writes on a stream of the device that is used for nothing else."""

    def __init__(self, slots: StagingSlots, device: Device) -> None:
        """Create the stream.

        Args:
            slots: Staging slots for all copies, used for nothing else.
            device: The device whose storages are copied.
        """
        self.slots = slots
        self._device = device
        self._on_stream = nullcontext if device.new_stream is None else device.new_stream()

    def current(self) -> AbstractContextManager[object]:
        """Make the device current on this thread; return a context with the stream for copies."""
        self._device.use_here()
        return self._on_stream()

    def event_here(self) -> Event | None:
        """Return an event behind the work queued on the current stream; None on the CPU."""
        return event_here(self._device.new_event)

    def stream_here(self, device: torch.device) -> torch.Stream | None:
        """Return the current stream; None on the CPU."""
        if self._device.new_event is None:
            return None
        here: torch.Stream = torch.get_device_module(device).current_stream()
        return here

    def allocate(self, record: Record) -> None:
        """Give a stored record memory for a read, allocated on the current stream.

        Raises:
            torch.OutOfMemoryError: The device has no room for it.
        """
        data = torch.empty(record.nbytes, dtype=torch.uint8, device=record.device)
        filled = self.event_here()  # passes when earlier users of this memory are done
        record.stream = self.stream_here(record.device)
        record.data, record.filled = data, filled

    def reserve(self, record: Record) -> None:
        """Reserve space for a storage.

        Raises:
            HostMemoryError: There is no memory for its checksums.
            StoreFullError: There is not enough space.
        """
        self.slots.store.reserve(key=record.key, nbytes=record.nbytes)

    def write(self, record: Record, data: torch.Tensor) -> None:
        """Write a storage that has space; on return all copies out of `data` are over.

        Raises:
            StoreError: The drive failed.
        """
        if record.filled is not None:
            record.filled.wait()
        self.slots.write(key=record.key, source=data)
        self.slots.submit_all(record.key)  # the copies are over then, and it may be discarded

    def read(self, record: Record, data: torch.Tensor) -> Event | None:
        """Read a storage; return an event that passes when its bytes are there.

        Raises:
            StoreError: The drive failed; no copy into `data` is in flight.
        """
        if record.filled is not None:
            record.filled.wait()
        try:
            self.slots.read(key=record.key, target=data)
        except BaseException:
            copied = self.event_here()
            if copied is not None:
                copied.synchronize()  # before the memory goes back
            raise
        return self.event_here()

    def discard(self, key: str) -> None:
        """Discard a storage's bytes on the drive, if there are any."""
        self.slots.store.discard(key=key)
        self.slots.take_failure(key)
