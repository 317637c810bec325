"""Slots that are lent, and found again when nobody has them."""

from __future__ import annotations

import torch

from memascend.transfer.lent_slots import LentSlots
from tests.support.streaming_fakes import FakeMemory


def make(count: int) -> tuple[LentSlots, list[str]]:
    waits: list[str] = []
    slots = LentSlots(
        memory=FakeMemory(), component="staging slots", wait_idle=lambda: waits.append("idle")
    )
    slots.exchange(slot_bytes=4096, slot_count=count)
    return slots, waits


def test_slots_are_lent_in_turn() -> None:
    slots, _ = make(2)
    first, second = slots.lend(4, torch.float32), slots.lend(4, torch.float32)
    slots.free(slots.slot_of(second))
    slots.free(slots.slot_of(first))
    assert (len(slots), slots.free_count) == (2, 2)
    assert slots.lend(1, torch.uint8).data_ptr() == second.data_ptr()


def test_only_what_nobody_has_is_found_and_the_device_is_waited_for_then() -> None:
    slots, waits = make(3)
    kept, listed = slots.lend(4, torch.float32), slots.lend(4, torch.float32)
    slot = slots.slot_of(listed)
    del listed
    assert not slots.find_lost([slot])
    assert (slots.free_count, waits) == (1, [])
    assert slots.find_lost([])
    assert (slots.free_count, waits) == (2, ["idle"])
    addresses = {slots.lend(1, torch.uint8).data_ptr() for _ in range(2)}
    assert kept.data_ptr() not in addresses


def test_a_slot_that_was_on_its_way_to_be_lent_is_found_too() -> None:
    slots, _ = make(1)
    slots._free.popleft()  # and Ctrl-C
    assert slots.find_lost([])
    assert slots.free_count == 1


def test_other_slots_take_the_place_of_all() -> None:
    slots, _ = make(3)
    slots.exchange(slot_bytes=8192, slot_count=2)
    assert (len(slots), slots.free_count) == (2, 2)
    assert slots.lend(8192, torch.uint8).nbytes == 8192
