"""Slots that are lent, and found again when nobody has them."""

from __future__ import annotations

import pytest
import torch

from memascend.transfer.slots import Slots
from tests.support.streaming_fakes import FakeMemory


def make(count: int) -> tuple[Slots, list[str]]:
    waits: list[str] = []
    slots = Slots(
        memory=FakeMemory(), component="staging slots", wait_idle=lambda: waits.append("idle")
    )
    slots.resize(slot_bytes=4096, slot_count=count)
    return slots, waits


def test_slots_are_lent_in_turn() -> None:
    slots, _ = make(2)
    first, second = slots.cut(4, torch.float32), slots.cut(4, torch.float32)
    slots.free(second)
    slots.free(first)
    assert (len(slots), slots.free_count) == (2, 2)
    again = slots.cut(4, torch.float32)
    slots.free(again)
    assert again.data_ptr() == first.data_ptr()
    assert slots.cut(1, torch.uint8).data_ptr() == second.data_ptr()


def test_only_what_nobody_has_is_found_and_the_device_is_waited_for_then() -> None:
    slots, waits = make(3)
    kept, listed = slots.cut(4, torch.float32), [slots.cut(4, torch.float32)]
    assert not slots.recover()
    assert (slots.free_count, waits) == (1, [])
    listed.clear()  # and Ctrl-C
    assert slots.free_count == 1  # a copy may be queued
    assert slots.recover()
    assert (slots.free_count, waits) == (2, ["idle"])
    addresses = {slots.cut(1, torch.uint8).data_ptr() for _ in range(2)}
    assert kept.data_ptr() not in addresses


def test_a_slot_that_was_on_its_way_to_be_lent_gives_itself_back() -> None:
    slots, waits = make(1)
    assert slots._pool.acquire(4096) is not None  # and Ctrl-C
    assert not slots.recover()
    assert (slots.free_count, waits) == (1, [])


def test_a_tensor_is_freed_once_and_not_by_a_view_of_it() -> None:
    slots, _ = make(2)
    lent = slots.cut(4, torch.float32)
    for other in (lent[:], torch.zeros(4)):
        with pytest.raises(AssertionError, match="not a cut tensor"):
            slots.free(other)
    slots.free(lent)
    with pytest.raises(AssertionError, match="was given back before"):
        slots.free(lent)
    assert slots.free_count == 2


def test_more_than_there_is_cannot_be_lent() -> None:
    slots, _ = make(1)
    lent = slots.cut(4096, torch.uint8)
    assert not slots.has_room(1)
    with pytest.raises(AssertionError, match="no slot is free"):
        slots.cut(1, torch.uint8)
    slots.free(lent)
    assert slots.has_room(4096)


def test_other_slots_take_the_place_of_all() -> None:
    slots, _ = make(3)
    slots.resize(slot_bytes=8192, slot_count=2)
    assert (len(slots), slots.free_count) == (2, 2)
    assert slots.cut(8192, torch.uint8).nbytes == 8192
