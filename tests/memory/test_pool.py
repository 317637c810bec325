"""The pool: exclusive slots in any size, within a budget or growing with the model's shapes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend._core import FreeSpace
from memascend.base.interfaces import HostMemory
from memascend.base.units import MIB, PAGE_BYTES, page_up
from memascend.errors import HostMemoryError
from memascend.memory.allocator import HostAllocator
from memascend.memory.pool import SLOT_PARTS, WASTE_MAX, Pool
from tests.support.ctrl_c import interruptions
from tests.support.examples import examples
from tests.support.streaming_fakes import FakeMemory

BUDGET_PAGES = 64
LARGEST_PAGES = BUDGET_PAGES // SLOT_PARTS


class CountedMemory(HostMemory):
    """Host tensors, and the most bytes of them that ever lived at once."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self.peak_bytes = 0

    def allocate(self, nbytes: int, *, component: str, zero: bool) -> torch.Tensor:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        self._live[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, storage.data_ptr())
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return tensor

    def contains(self, tensor: torch.Tensor) -> bool:
        return False


def make(pages: int | None = BUDGET_PAGES) -> tuple[Pool, HostAllocator]:
    memory = HostAllocator(lock=False, huge_pages="off")
    budget_bytes = None if pages is None else pages * PAGE_BYTES
    return Pool(memory=memory, component="slots", budget_bytes=budget_bytes), memory


def growing() -> Pool:
    return make(None)[0]


def account(memory: HostAllocator) -> tuple[int, int]:
    """Bytes that live, and the most that ever did."""
    stats = memory.core.components().get("slots")
    return (0, 0) if stats is None else (stats.live_bytes, stats.peak_bytes)


# -- leases, of either kind ------------------------------------------------------------------------


def bounded_with_one_slot() -> tuple[Pool, int]:
    pool, _ = make(SLOT_PARTS)
    pool.resize(PAGE_BYTES, slot_bytes_max=PAGE_BYTES)
    return pool, PAGE_BYTES


def growing_with_one_slot() -> tuple[Pool, int]:
    pool = growing()
    assert pool.grow(100)
    return pool, PAGE_BYTES


by_kind = pytest.mark.parametrize("make_one", [bounded_with_one_slot, growing_with_one_slot])
MakeOne = Callable[[], tuple[Pool, int]]


@by_kind
def test_a_slot_is_taken_until_the_transfer_on_it_is_over_too(make_one: MakeOne) -> None:
    pool, nbytes = make_one()
    lease = pool.acquire(nbytes)
    assert lease is not None
    holds = [lease.hold(), lease.hold()]
    lease.release()
    lease.release()
    holds.pop()
    assert pool.acquire(1) is None
    holds.pop()
    assert pool.acquire(1) is not None


@by_kind
def test_a_lease_that_is_lost_gives_its_slot_back(make_one: MakeOne) -> None:
    pool, nbytes = make_one()
    lease = pool.acquire(nbytes)
    assert pool.acquire(1) is None
    del lease
    gc.collect()
    assert pool.acquire(nbytes) is not None


@by_kind
def test_a_released_lease_gives_no_hold(make_one: MakeOne) -> None:
    pool, nbytes = make_one()
    lease = pool.acquire(nbytes)
    assert lease is not None
    lease.release()
    with pytest.raises(ValueError, match="released lease"):
        lease.hold()


@by_kind
def test_a_view_has_the_shape_asked_for_and_outlives_the_pool(make_one: MakeOne) -> None:
    pool, nbytes = make_one()
    lease = pool.acquire(3 * 4)
    assert lease is not None
    assert lease.slot_bytes == nbytes
    view = lease.view(3, torch.float32)
    assert (view.shape, view.dtype) == ((3,), torch.float32)
    assert view.data_ptr() % PAGE_BYTES == 0
    lease.release()
    del pool, lease
    gc.collect()
    assert view.fill_(7).tolist() == [7.0] * 3


def test_free_runs_refuse_bytes_that_are_taken_and_a_run_that_is_not() -> None:
    space = FreeSpace(3 * PAGE_BYTES)
    run = space.take(begin=PAGE_BYTES, nbytes=PAGE_BYTES)
    for begin, nbytes in ((0, 2 * PAGE_BYTES), (PAGE_BYTES, 1), (0, 0), (2 * PAGE_BYTES, 1 << 40)):
        with pytest.raises(ValueError, match=r"not all free|must be positive"):
            space.take(begin=begin, nbytes=nbytes)
    assert space.best(2 * PAGE_BYTES) is None
    assert space.best(2 * PAGE_BYTES, besides=run) == (0, 3 * PAGE_BYTES)
    assert space.free_bytes == 2 * PAGE_BYTES  # it counted as free, and is not
    run.release()
    assert space.largest() == (0, 3 * PAGE_BYTES)
    with pytest.raises(ValueError, match="was released"):
        space.best(1, besides=run)
    with pytest.raises(ValueError, match="of another space"):
        space.largest(besides=FreeSpace(1).take(begin=0, nbytes=1))
    with pytest.raises(ValueError, match="must be positive"):
        FreeSpace(0)


# -- within a budget -------------------------------------------------------------------------------


def test_no_memory_is_taken_before_a_slot_is_needed() -> None:
    pool, memory = make()
    assert pool.held_bytes == 0
    assert account(memory) == (0, 0)


def test_as_many_of_the_largest_slots_fit_as_promised() -> None:
    pool, memory = make()
    leases = [pool.acquire(pool.slot_bytes_max) for _ in range(SLOT_PARTS)]
    assert all(lease is not None for lease in leases)
    assert pool.acquire(1) is None
    assert account(memory)[0] == BUDGET_PAGES * PAGE_BYTES


def test_a_released_slot_serves_other_sizes() -> None:
    pool, memory = make()
    leases = [pool.acquire(pool.slot_bytes_max) for _ in range(SLOT_PARTS)]
    leases.pop()
    small = [pool.acquire(PAGE_BYTES) for _ in range(LARGEST_PAGES)]
    assert all(lease is not None for lease in small)
    assert pool.acquire(1) is None
    small.clear()
    assert pool.acquire(pool.slot_bytes_max) is not None
    assert account(memory)[1] <= pool.budget_bytes


def test_idle_small_segments_give_way_to_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memascend.memory.pool.SEGMENT_BYTES_MIN", PAGE_BYTES)
    pool, memory = make()
    small = [pool.acquire(PAGE_BYTES) for _ in range(BUDGET_PAGES)]
    assert all(lease is not None for lease in small)
    assert pool.held_bytes == pool.budget_bytes
    small.clear()
    large = [pool.acquire(pool.slot_bytes_max) for _ in range(SLOT_PARTS)]
    assert all(lease is not None for lease in large)
    assert account(memory)[1] <= pool.budget_bytes


def test_what_is_too_large_takes_nothing_and_a_budget_does_not_grow() -> None:
    pool, memory = make()
    assert pool.acquire(pool.slot_bytes_max + 1) is None
    assert pool.acquire(0) is None
    assert pool.slot_bytes(pool.slot_bytes_max + 1) == 0
    assert pool.slot_bytes(1) == PAGE_BYTES
    assert not pool.grow(1)
    assert account(memory) == (0, 0)


def test_a_budget_without_room_for_pages_is_refused() -> None:
    memory = HostAllocator(lock=False, huge_pages="off")
    with pytest.raises(ValueError, match="larger parameter budget"):
        Pool(memory=memory, component="slots", budget_bytes=SLOT_PARTS * PAGE_BYTES - 1)


def test_where_the_system_has_no_memory_that_is_the_error() -> None:
    memory = HostAllocator(lock=False, huge_pages="off", limit_bytes=PAGE_BYTES)
    bounded = Pool(memory=memory, component="slots", budget_bytes=64 * MIB)
    with pytest.raises(HostMemoryError):
        bounded.acquire(8 * MIB)
    with pytest.raises(HostMemoryError):
        Pool(memory=memory, component="slots").grow(8 * MIB)


def test_a_budget_is_exchanged_only_while_no_slot_is_leased() -> None:
    pool, memory = make()
    lease = pool.acquire(1)
    with pytest.raises(ValueError, match="GatheredParameters"):
        pool.resize(PAGE_BYTES, slot_bytes_max=PAGE_BYTES)
    assert lease is not None
    lease.release()
    pool.resize(5 * PAGE_BYTES, slot_bytes_max=2 * PAGE_BYTES)
    assert account(memory)[0] == pool.held_bytes == pool.free_bytes == 5 * PAGE_BYTES
    assert pool.slot_bytes(2 * PAGE_BYTES + 1) == 0


Step = tuple[int, int]  # bytes to acquire, and which lease to release when there is no slot


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, LARGEST_PAGES * PAGE_BYTES), st.integers(0, 1 << 16))),
    st.sampled_from([PAGE_BYTES, 5 * PAGE_BYTES, 4 * MIB]),
)
def test_slots_never_overlap_and_memory_stays_within_the_budget(
    steps: list[Step], first_segment_bytes: int
) -> None:
    memory = CountedMemory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memascend.memory.pool.SEGMENT_BYTES_MIN", first_segment_bytes)
        pool = Pool(memory=memory, component="slots", budget_bytes=BUDGET_PAGES * PAGE_BYTES)
        use_and_release(pool, steps)
        assert pool.free_bytes == pool.held_bytes
        assert pool.acquire(pool.slot_bytes_max) is not None
    assert memory.peak_bytes <= pool.budget_bytes


def use_and_release(pool: Pool, steps: list[Step]) -> None:
    held: list[tuple[Any, int]] = []
    for number, (nbytes, which) in enumerate(steps):
        lease = pool.acquire(nbytes)
        if lease is not None:
            assert lease.slot_bytes == pool.slot_bytes(nbytes)
            lease.slot.fill_(number % 251)
            held.append((lease, number % 251))
        elif held:
            released, stamp = held.pop(which % len(held))
            assert torch.all(released.slot == stamp)
            released.release()
        assert pool.held_bytes - pool.free_bytes == sum(one.slot_bytes for one, _ in held)
        assert pool.held_bytes <= pool.budget_bytes
    assert all(torch.all(lease.slot == stamp) for lease, stamp in held)


# -- without a budget ------------------------------------------------------------------------------


def test_there_is_no_slot_before_the_pool_grew() -> None:
    pool = growing()
    assert pool.acquire(100) is None
    assert pool.grow(100)
    lease = pool.acquire(100)
    assert lease is not None
    assert pool.acquire(100) is None
    address = lease.view(10, torch.float32).data_ptr()
    lease.release()
    again = pool.acquire(PAGE_BYTES)
    assert again is not None
    assert again.view(10, torch.float32).data_ptr() == address


def test_memory_follows_the_shapes_not_the_largest_of_them() -> None:
    pool, memory = make(None)
    sizes = [1002 * PAGE_BYTES, 32 * PAGE_BYTES, 32 * PAGE_BYTES, 5000]
    for nbytes in sizes:
        pool.grow(nbytes)
    leases = [pool.acquire(nbytes) for nbytes in sizes]
    assert all(lease is not None for lease in leases)
    assert account(memory)[0] == pool.held_bytes == sum(map(page_up, sizes))


def test_a_slot_serves_nearly_its_size_and_no_other() -> None:
    pool = growing()
    pool.grow(100 * PAGE_BYTES)
    assert pool.acquire(101 * PAGE_BYTES) is None
    assert pool.acquire(93 * PAGE_BYTES) is None
    lease = pool.acquire(94 * PAGE_BYTES)
    assert lease is not None
    assert lease.slot_bytes == 100 * PAGE_BYTES
    assert pool.free_bytes == 0


def test_of_two_slots_the_smaller_serves() -> None:
    pool = growing()
    for pages in (100, 98):
        pool.grow(pages * PAGE_BYTES)
    lease = pool.acquire(97 * PAGE_BYTES)
    assert lease is not None
    assert lease.slot_bytes == 98 * PAGE_BYTES


@settings(deadline=None)
@given(st.lists(st.integers(1, 40 * PAGE_BYTES), max_size=30))
def test_slots_used_again_waste_at_most_their_share(sizes: list[int]) -> None:
    pool = Pool(memory=CountedMemory(), component="slots")
    for nbytes in [*sizes, *reversed(sizes)]:
        lease = pool.acquire(nbytes)
        if lease is None:
            assert pool.grow(nbytes)
            lease = pool.acquire(nbytes)
        assert lease is not None
        waste_bytes = lease.slot_bytes - page_up(nbytes)
        assert 0 <= waste_bytes <= max(PAGE_BYTES, WASTE_MAX * lease.slot_bytes)
        assert pool.suits(lease.slot_bytes, nbytes)
        lease.release()
    assert pool.free_bytes == pool.held_bytes
    assert pool.held_bytes <= sum(map(page_up, set(sizes)))


def test_within_a_budget_every_slot_gives_room_and_else_its_size_decides() -> None:
    bounded, _ = make()
    assert bounded.suits(PAGE_BYTES, 10 * PAGE_BYTES)
    assert not growing().suits(PAGE_BYTES, 10 * PAGE_BYTES)
    assert not growing().suits(10 * PAGE_BYTES, PAGE_BYTES)


def test_after_ctrl_c_at_any_line_no_slot_is_lost_or_leased_twice() -> None:
    budget_bytes = 8 * PAGE_BYTES
    pools: list[Pool] = []

    def make() -> Callable[[], None]:
        pools[:] = [Pool(memory=FakeMemory(), component="slots", budget_bytes=budget_bytes)]
        pools[0].resize(budget_bytes, slot_bytes_max=2 * PAGE_BYTES)
        return lambda: lease_and_release(pools[0])

    count = 0
    for where in interruptions(make):
        count += 1
        leases = [pools[0].acquire(2 * PAGE_BYTES) for _ in range(4)]
        assert None not in leases, where
        assert len({lease.slot.data_ptr() for lease in leases if lease is not None}) == 4, where
    assert count > 50


def lease_and_release(pool: Pool) -> None:
    for _ in range(2):
        leases = [pool.acquire(PAGE_BYTES) for _ in range(3)]
        for lease in leases:
            assert lease is not None
            lease.release()
