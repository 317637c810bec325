"""Slots within a byte budget: exclusive, never more memory than allowed, reused in any size."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.errors import HostMemoryError, PoolExhaustedError
from memascend.memory.allocator import HostAllocator
from memascend.memory.budget import PAGE_BYTES, SEGMENT_COUNT, BudgetSlots, round_up
from tests.support.examples import examples

BUDGET_PAGES = 64
LARGEST_PAGES = BUDGET_PAGES // SEGMENT_COUNT


class CountedMemory:
    """Host tensors, and the most bytes of them that ever lived at once."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self.peak_bytes = 0

    def tensor(
        self, numel: int, dtype: torch.dtype, *, component: str, zero: bool = False
    ) -> torch.Tensor:
        tensor = torch.zeros(numel, dtype=dtype)
        storage = tensor.untyped_storage()
        self._live[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, storage.data_ptr())
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return tensor

    def contains(self, tensor: torch.Tensor) -> bool:
        return False


def make(pages: int = BUDGET_PAGES) -> tuple[BudgetSlots, HostAllocator]:
    memory = HostAllocator(lock=False, huge_pages="off")
    return BudgetSlots(memory=memory, budget_bytes=pages * PAGE_BYTES), memory


def live_bytes(memory: HostAllocator) -> int:
    components = memory.core.components()
    return components["parameter pool"].live_bytes if "parameter pool" in components else 0


def peak_bytes(memory: HostAllocator) -> int:
    components = memory.core.components()
    return components["parameter pool"].peak_bytes if "parameter pool" in components else 0


def test_no_memory_is_taken_before_a_slot_is_needed() -> None:
    slots, memory = make()
    assert slots.held_bytes == 0
    assert live_bytes(memory) == 0


def test_as_many_of_the_largest_slots_fit_as_promised() -> None:
    slots, memory = make()
    leases = [slots.acquire(slots.slot_bytes_max) for _ in range(SEGMENT_COUNT)]
    assert all(lease is not None for lease in leases)
    assert slots.acquire(1) is None
    assert live_bytes(memory) == BUDGET_PAGES * PAGE_BYTES


def test_a_released_slot_serves_other_sizes() -> None:
    slots, memory = make()
    leases = [slots.acquire(slots.slot_bytes_max) for _ in range(SEGMENT_COUNT)]
    leases.pop()
    small = [slots.acquire(PAGE_BYTES) for _ in range(LARGEST_PAGES)]
    assert all(lease is not None for lease in small)
    assert slots.acquire(1) is None
    small.clear()
    assert slots.acquire(slots.slot_bytes_max) is not None
    assert peak_bytes(memory) <= slots.budget_bytes


def test_idle_small_segments_give_way_to_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memascend.memory.budget.SEGMENT_BYTES_MIN", PAGE_BYTES)
    slots, memory = make()
    small = [slots.acquire(PAGE_BYTES) for _ in range(BUDGET_PAGES)]
    assert all(lease is not None for lease in small)
    assert slots.held_bytes == slots.budget_bytes
    small.clear()
    large = [slots.acquire(slots.slot_bytes_max) for _ in range(SEGMENT_COUNT)]
    assert all(lease is not None for lease in large)
    assert peak_bytes(memory) <= slots.budget_bytes


def test_a_slot_is_taken_until_the_transfer_on_it_is_over_too() -> None:
    slots, _ = make()
    leases = [slots.acquire(slots.slot_bytes_max) for _ in range(SEGMENT_COUNT)]
    first = leases[0]
    assert first is not None
    hold = first.hold()
    first.release()
    first.release()
    assert slots.acquire(1) is None
    del hold
    assert slots.acquire(1) is not None


def test_a_released_lease_gives_no_hold() -> None:
    slots, _ = make()
    lease = slots.acquire(1)
    assert lease is not None
    lease.release()
    with pytest.raises(ValueError, match="released lease"):
        lease.hold()


def test_a_slot_larger_than_allowed_is_never_given() -> None:
    slots, _ = make()
    assert slots.acquire(slots.slot_bytes_max + 1) is None
    assert slots.acquire(0) is None
    with pytest.raises(PoolExhaustedError, match=str(slots.budget_bytes)):
        slots.grow(slots.slot_bytes_max + 1)


def test_a_budget_without_room_for_pages_is_refused() -> None:
    memory = HostAllocator(lock=False, huge_pages="off")
    with pytest.raises(ValueError, match="larger parameter budget"):
        BudgetSlots(memory=memory, budget_bytes=SEGMENT_COUNT * PAGE_BYTES - 1)


def test_where_the_system_has_no_memory_that_is_the_error() -> None:
    memory = HostAllocator(lock=False, huge_pages="off", limit_bytes=PAGE_BYTES)
    slots = BudgetSlots(memory=memory, budget_bytes=64 << 20)
    with pytest.raises(HostMemoryError):
        slots.acquire(8 << 20)


def test_a_view_has_the_shape_asked_for() -> None:
    slots, _ = make()
    lease = slots.acquire(3 * 4)
    assert lease is not None
    assert lease.slot_bytes == PAGE_BYTES
    view = slots.view(lease, 3, torch.float32)
    assert (view.shape, view.dtype) == ((3,), torch.float32)
    assert view.data_ptr() % PAGE_BYTES == 0


Step = tuple[int, int]  # bytes to acquire, or 0 and which lease to release


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, LARGEST_PAGES * PAGE_BYTES), st.integers(0, 1 << 16))),
    st.sampled_from([PAGE_BYTES, 5 * PAGE_BYTES, 1 << 22]),
)
def test_slots_never_overlap_and_memory_stays_within_the_budget(
    steps: list[Step], first_segment_bytes: int
) -> None:
    memory = CountedMemory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memascend.memory.budget.SEGMENT_BYTES_MIN", first_segment_bytes)
        slots = BudgetSlots(memory=memory, budget_bytes=BUDGET_PAGES * PAGE_BYTES)
        use_and_release(slots, steps)
        assert slots.free_bytes == slots.held_bytes
        assert slots.acquire(slots.slot_bytes_max) is not None
    assert memory.peak_bytes <= slots.budget_bytes


def use_and_release(slots: BudgetSlots, steps: list[Step]) -> None:
    held: list[tuple[Any, int]] = []
    for number, (nbytes, which) in enumerate(steps):
        lease = slots.acquire(nbytes)
        if lease is not None:
            assert lease.slot_bytes == round_up(nbytes)
            lease.slot.fill_(number % 251)
            held.append((lease, number % 251))
        elif held:
            released, stamp = held.pop(which % len(held))
            assert torch.all(released.slot == stamp)
            released.release()
        assert slots.held_bytes - slots.free_bytes == sum(one.slot_bytes for one, _ in held)
        assert slots.held_bytes <= slots.budget_bytes
    assert all(torch.all(lease.slot == stamp) for lease, stamp in held)
