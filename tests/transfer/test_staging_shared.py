"""Small tensors share a staging slot, and no mix of transfers shows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.base.units import PAGE_BYTES
from memascend.transfer import slots as module
from memascend.transfer.slots import PART_COUNT, Slots
from memascend.transfer.staging import StagingSlots
from tests.support.examples import examples
from tests.support.staging_slots import SLOT_BYTES, counted, make_staging
from tests.support.streaming_fakes import FakeMemory, FakeStore, LateDevice

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64)


def share_small_slots(patch: pytest.MonkeyPatch) -> None:
    """Have slots of a page shared, too."""
    patch.setattr(module, "page_down", lambda nbytes: nbytes)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


def write_each(staging: StagingSlots, device: LateDevice, keys: Sequence[str], nbytes: int) -> None:
    for number, key in enumerate(keys):
        source = torch.full((nbytes,), number % 251, dtype=torch.uint8)
        staging.store.reserve(key=key, nbytes=nbytes)
        staging.write(key=key, source=device.tensor(source))


def test_small_tensors_wait_for_the_device_only_when_all_slots_are_full(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_small_slots(monkeypatch)
    device, slot_count = LateDevice(), 3
    staging = make_staging(store, slot_count=slot_count, device=device)
    keys = [f"k{number}" for number in range(slot_count * PART_COUNT)]
    with device:
        write_each(staging, device, keys, 100)
        assert device._done == 0
        write_each(staging, device, ["one more"], 100)
        assert 0 < device._done <= PART_COUNT  # one slot's
    staging.wait_writes()
    for number, key in enumerate(keys):
        assert store.content[key].tolist() == [number] * 100


@pytest.mark.parametrize("nbytes", [1, SLOT_BYTES // 2, SLOT_BYTES // 2 + 1, SLOT_BYTES])
def test_a_tensor_of_a_whole_slot_gets_one_once_the_parts_of_one_are_over(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    share_small_slots(monkeypatch)
    device = LateDevice()
    staging = make_staging(store, slot_count=2, device=device)
    store.content["read"] = counted(SLOT_BYTES, torch.uint8)
    with device:
        for _ in range(3):
            write_each(staging, device, ["a", "b"], nbytes)
            target = device.tensor(torch.zeros(SLOT_BYTES, dtype=torch.uint8))
            staging.read(key="read", target=target)
            write_each(staging, device, ["c"], SLOT_BYTES)
    assert torch.equal(target.plain(), store.content["read"])
    staging.wait_writes()
    assert [int(store.content[key][0]) for key in "abc"] == [0, 1, 0]


def test_what_shares_a_slot_begins_on_pages_of_its_own() -> None:
    slot_bytes = 2 * PART_COUNT * PAGE_BYTES
    slots = Slots(memory=FakeMemory(), component="staging slots")
    slots.resize(slot_bytes=slot_bytes, slot_count=2)
    lent = [slots.cut(numel, torch.float32) for numel in (1, 2 * PAGE_BYTES // 4, 2 * PAGE_BYTES)]
    begins = [part.data_ptr() - lent[0].data_ptr() for part in lent]
    assert begins == [0, 2 * PAGE_BYTES, 4 * PAGE_BYTES]
    assert slots.free_count == 1
    assert slots.has_room(slot_bytes)
    slots.cut(slot_bytes, torch.uint8)
    assert not slots.has_room(1)
    for part in lent:
        assert slots.free_count == 0
        slots.free(part)
    assert slots.free_count == 1


def test_a_slot_that_is_free_again_is_lent_from_its_beginning() -> None:
    slots = Slots(memory=FakeMemory(), component="staging slots")
    slots.resize(slot_bytes=PART_COUNT * PAGE_BYTES, slot_count=2)
    first = slots.cut(1, torch.uint8)
    slots.free(first)
    slots.free(slots.cut(1, torch.uint8))  # the other slot's
    part = slots.cut(1, torch.uint8)
    assert part.data_ptr() == first.data_ptr()
    whole = slots.cut(PART_COUNT * PAGE_BYTES, torch.uint8)
    assert abs(whole.data_ptr() - part.data_ptr()) >= PART_COUNT * PAGE_BYTES
    assert slots.free_count == 0


# -- any mix ---------------------------------------------------------------------------------------


Action = tuple[str, int, int, int]


@settings(max_examples=examples(150), deadline=None)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["write", "read", "chunk", "settle", "pass"]),
            st.integers(0, 2),  # key
            st.integers(0, 3 * SLOT_BYTES),  # offset
            st.integers(1, SLOT_BYTES // 8) | st.integers(1, 5 * SLOT_BYTES),  # elements
        ),
        max_size=25,
    ),
    dtype=st.sampled_from(DTYPES),
    slot_count=st.integers(2, 5),
    late=st.booleans(),
    shared=st.booleans(),
)
def test_any_mix_of_transfers_gives_what_program_order_gives(
    actions: list[Action], dtype: torch.dtype, slot_count: int, late: bool, shared: bool
) -> None:
    store, device = FakeStore(), LateDevice()
    with pytest.MonkeyPatch.context() as patch:
        if shared:
            share_small_slots(patch)
        staging = make_staging(store, slot_count=slot_count, device=device if late else None)
    capacity = 8 * SLOT_BYTES
    expected = {f"k{number}": torch.zeros(capacity, dtype=dtype) for number in range(3)}
    for key, content in expected.items():
        store.content[key] = content.view(torch.uint8).clone()
    checks: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
    with device:
        for seed, (kind, number, begin, length) in enumerate(actions):
            key = f"k{number}"
            part = slice(begin, min(begin + length, capacity))
            count, offset_bytes = part.stop - begin, begin * dtype.itemsize
            if kind == "write":
                content = counted(count, dtype, seed)
                expected[key][part] = content
                source = device.tensor(content.clone()) if late else content
                staging.write(key=key, source=source, offset_bytes=offset_bytes)
            elif kind == "read":
                target = torch.zeros(count, dtype=dtype)
                target = device.tensor(target) if late else target
                staging.read(key=key, target=target, offset_bytes=offset_bytes)
                checks.append((target, expected[key][part].clone()))
            elif kind == "chunk":
                count = min(count, SLOT_BYTES // dtype.itemsize)
                chunk = next(staging.read_each([(key, offset_bytes, count, dtype)]))
                assert torch.equal(chunk, expected[key][begin : begin + count])
                chunk.fill_(seed)
                expected[key][begin : begin + count] = seed
                staging.submit(key, chunk, offset_bytes)
            elif kind == "settle":
                staging.wait_writes()
            else:
                device.advance(length % 4)
        staging.wait_writes()
        device.synchronize()
    for target, content in checks:
        assert torch.equal(target.plain() if late else target, content)
    for key, content in expected.items():
        assert torch.equal(store.value(key, dtype), content)
