"""Bytes pass to the drive and back, in the device's order, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from memascend.base.interfaces import Device
from memascend.errors import StoreError
from memascend.nvme.store import MemoryFaults
from memascend.streaming.activations.copies import Copies
from memascend.streaming.activations.records import Record
from tests.support.activation_streams import InOrder, activation_stream, numbers


def copies(faults: MemoryFaults | None = None, device: Device | None = None) -> Copies:
    slots = activation_stream(faults, new_event=device.new_event if device else None).slots
    return Copies(slots, device or Device())


def test_a_storage_comes_back_as_it_was_until_it_is_discarded() -> None:
    there, record = copies(), Record(0, numbers(0))
    assert record.data is not None
    with there.current():
        there.reserve(record)
        there.write(record, record.data)
        there.allocate(record)
        assert there.read(record, record.data) is None
    assert torch.equal(record.data.view(torch.float32), numbers(0))
    there.slots.wait_writes()
    there.discard(record.key)
    there.discard(record.key)
    with pytest.raises(StoreError):
        there.read(record, record.data)


def test_the_device_and_its_own_stream_are_current_for_copies() -> None:
    calls: list[str] = []

    class Current:
        def __enter__(self) -> None:
            calls.append("stream")

        def __exit__(self, *_: object) -> None:
            calls.append("end")

    device = Device(use_here=lambda: calls.append("device"), new_stream=lambda: Current)
    with copies(device=device).current():
        calls.append("copies")
    assert calls == ["device", "stream", "copies", "end"]


def test_a_read_that_fails_leaves_no_copy_in_flight() -> None:
    faults = MemoryFaults()
    there = copies(faults, Device(new_event=InOrder))
    record = Record(0, numbers(0))
    assert record.data is not None
    there.reserve(record)
    there.write(record, record.data)
    there.slots.wait_writes()
    faults.gone = 5
    with pytest.raises(StoreError):
        there.read(record, record.data)
    assert InOrder.passed == InOrder.made
