"""The pool: size classes from shapes, exclusive leases, holds by I/O, exhaustion, growth."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memascend import _core
from memascend.base.units import KIB, MIB
from memascend.errors import HostMemoryError, PoolExhaustedError
from memascend.memory.allocator import HostAllocator
from memascend.memory.pool import (
    CLASS_COUNT_MAX,
    MERGE_WASTE_MAX,
    ParameterPool,
    SizeClass,
    derive_classes,
)
from tests.support.examples import examples

PAGE_BYTES = 4096
SIZES = {"small": 2 * PAGE_BYTES, "middle": 5 * PAGE_BYTES, "large": 16 * PAGE_BYTES}


def make_allocator(limit_bytes: int = 0) -> HostAllocator:
    return HostAllocator(lock=False, huge_pages="off", limit_bytes=limit_bytes)


def make_pool(slot_count: int = 1) -> _core.Pool:
    pool = _core.Pool(allocator=make_allocator().core, component="pool")
    for name, slot_bytes in SIZES.items():
        pool.add_class(name=name, slot_bytes=slot_bytes, slot_count=slot_count)
    return pool


class PoolAgainstModel(RuleBasedStateMachine):
    """Random acquire, hold, release, drop and grow against a model of who may use which slot."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.slot_count = dict.fromkeys(SIZES, 1)
        self.leases: list[tuple[_core.Lease, int]] = []
        # Slots in use by I/O after or beside their lease: handle, class, address.
        self.holds: list[tuple[_core.HoldHandle, str, int]] = []
        self.mark = 0

    @rule(nbytes=st.integers(1, 17 * PAGE_BYTES), allow_larger=st.booleans())
    def acquire(self, nbytes: int, allow_larger: bool) -> None:
        fitting = [name for name, slot_bytes in SIZES.items() if slot_bytes >= nbytes]
        candidates = fitting if allow_larger else fitting[:1]
        expected = next((name for name in candidates if self.free_count(name) > 0), None)
        lease = self.pool.acquire(nbytes=nbytes, allow_larger=allow_larger)
        if lease is None:
            assert expected is None
            exhaustion = self.pool.exhaustion(nbytes=nbytes)
            assert exhaustion.requested_bytes == nbytes
            assert exhaustion.class_name == (fitting[0] if fitting else "")
            if fitting:
                assert exhaustion.slot_count == self.slot_count[fitting[0]]
                assert exhaustion.leased_count == exhaustion.slot_count
            return
        assert lease.class_name == expected
        assert lease.slot_bytes == SIZES[lease.class_name]
        assert lease.nbytes == memoryview(lease).nbytes == nbytes
        assert lease.address not in self.used_addresses()
        self.mark = self.mark % 255 + 1
        memoryview(lease)[:] = bytes([self.mark]) * nbytes
        self.leases.append((lease, self.mark))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        # An index is drawn: hypothesis would keep a drawn lease alive.
        lease, _ = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]
        self.holds.append((lease.hold(), lease.class_name, lease.address))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), explicitly=st.booleans())
    def give_up(self, data: st.DataObject, explicitly: bool) -> None:
        lease, mark = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.check_contents(lease, mark)
        if explicitly:
            lease.release()
            lease.release()
            assert lease.released
            with pytest.raises(ValueError, match="released"):
                lease.hold()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def finish_io(self, data: st.DataObject) -> None:
        self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))

    @rule(name=st.sampled_from(sorted(SIZES)), count=st.integers(1, 2))
    def grow(self, name: str, count: int) -> None:
        self.pool.add_slots(name=name, count=count)
        self.slot_count[name] += count

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.is_valid()
        for stats in self.pool.classes():
            assert stats.slot_count == self.slot_count[stats.name]
            assert stats.slot_count - stats.leased_count == self.free_count(stats.name)
            assert stats.leased_count_peak >= stats.leased_count

    def teardown(self) -> None:
        for lease, mark in self.leases:
            self.check_contents(lease, mark)

    def used_addresses(self, name: str | None = None) -> set[int]:
        leased = {one.address for one, _ in self.leases if name in (None, one.class_name)}
        return leased | {address for _, held, address in self.holds if name in (None, held)}

    def free_count(self, name: str) -> int:
        return self.slot_count[name] - len(self.used_addresses(name))

    @staticmethod
    def check_contents(lease: _core.Lease, mark: int) -> None:
        assert bytes(memoryview(lease)) == bytes([mark]) * lease.nbytes


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=examples(60), stateful_step_count=50, deadline=None
)


def test_a_slot_under_io_is_not_leased_again_after_release() -> None:
    pool = make_pool()
    lease = pool.acquire(nbytes=100)
    assert lease is not None
    address = lease.address
    hold = lease.hold()
    lease.release()
    assert pool.acquire(nbytes=100) is None
    del hold
    again = pool.acquire(nbytes=100)
    assert again is not None
    assert again.address == address


def test_a_dropped_lease_gives_its_slot_back() -> None:
    pool = make_pool()
    lease = pool.acquire(nbytes=100)
    assert lease is not None
    del lease
    gc.collect()
    assert pool.acquire(nbytes=100) is not None


def test_a_tensor_over_a_lease_keeps_the_slot() -> None:
    pool = make_pool()
    tensor = torch.frombuffer(pool.acquire(nbytes=400), dtype=torch.float32)
    alias = tensor[10:]
    del tensor
    gc.collect()
    assert pool.acquire(nbytes=400) is None
    del alias
    gc.collect()
    assert pool.acquire(nbytes=400) is not None


def test_a_released_lease_gives_no_new_view_and_no_address() -> None:
    lease = make_pool().acquire(nbytes=100)
    assert lease is not None
    lease.release()
    with pytest.raises(BufferError) as info:
        memoryview(lease)
    assert "released" in str(info.value.__cause__)
    with pytest.raises(ValueError, match="released"):
        _ = lease.address


def test_views_from_before_release_stay_mapped_even_without_the_pool() -> None:
    pool = make_pool()
    lease = pool.acquire(nbytes=100)
    assert lease is not None
    view = memoryview(lease)
    lease.release()
    del pool, lease
    gc.collect()
    view[:] = b"x" * 100
    assert view[99] == ord("x")


def test_a_hold_can_be_referred_to_until_it_is_dropped() -> None:
    pool = make_pool()
    lease = pool.acquire(nbytes=100)
    assert lease is not None
    holds = [lease.hold(), lease.hold()]
    del lease
    holds.pop()
    assert pool.acquire(nbytes=100) is None
    holds.pop()
    assert pool.acquire(nbytes=100) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "small", "slot_bytes": 99 * PAGE_BYTES, "slot_count": 1}, "exists already"),
        (
            {"name": "twin", "slot_bytes": 2 * PAGE_BYTES - 1, "slot_count": 1},
            "'small' already has",
        ),
        ({"name": "", "slot_bytes": 1, "slot_count": 1}, "needs a name"),
        ({"name": "none", "slot_bytes": 0, "slot_count": 1}, "must be positive"),
    ],
)
def test_a_senseless_class_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pool().add_class(**arguments)


def test_slots_for_an_unknown_class_are_refused_naming_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no size class 'huge'.*small middle large"):
        make_pool().add_slots(name="huge", count=1)


def test_an_exhausted_class_is_named_with_its_counts() -> None:
    pool = ParameterPool(allocator=make_allocator())
    pool.add_class(SizeClass("ffn", 64 * KIB, 8), slot_count=2)
    leases = [pool.acquire(60 * KIB, grow=False) for _ in range(2)]
    with pytest.raises(PoolExhaustedError, match=r"'ffn' \(65536 bytes a slot\) has 2 of 2 slots"):
        pool.acquire(60 * KIB, grow=False)
    pool.release(leases[0])
    assert pool.acquire(60 * KIB, grow=False).class_name == "ffn"


def test_a_request_above_every_class_is_refused_even_with_growth() -> None:
    pool = ParameterPool(allocator=make_allocator())
    pool.add_class(SizeClass("ffn", 64 * KIB, 8), slot_count=1)
    with pytest.raises(PoolExhaustedError, match="largest size class has slots of 65536 bytes"):
        pool.acquire(64 * KIB + 1, grow=True)


def test_a_free_larger_slot_serves_where_growth_is_not_allowed() -> None:
    pool = ParameterPool(allocator=make_allocator())
    pool.add_class(SizeClass("norm", PAGE_BYTES, 8), slot_count=1)
    pool.add_class(SizeClass("ffn", 64 * KIB, 8), slot_count=1)
    leases = [pool.acquire(100, grow=False) for _ in range(2)]
    assert [lease.class_name for lease in leases] == ["norm", "ffn"]


def test_growth_adds_one_slot_to_the_fitting_class_and_stops_at_the_limit() -> None:
    allocator = make_allocator(limit_bytes=4 * 64 * KIB)
    pool = ParameterPool(allocator=allocator)
    pool.add_class(SizeClass("ffn", 64 * KIB, 8), slot_count=1)
    leases = [pool.acquire(64 * KIB, grow=True) for _ in range(4)]
    assert len({lease.address for lease in leases}) == 4
    with pytest.raises(HostMemoryError, match="'parameter_pool' needs"):
        pool.acquire(64 * KIB, grow=True)
    assert pool.classes()[0].slot_count == 4
    assert allocator.core.components()["parameter_pool"].live_bytes == 4 * 64 * KIB


def test_threads_that_grow_one_class_all_get_a_slot() -> None:
    pool = ParameterPool(allocator=make_allocator())
    pool.add_class(SizeClass("ffn", PAGE_BYTES, 8), slot_count=0)
    leases: list[_core.Lease] = []
    threads = [
        threading.Thread(target=lambda: leases.append(pool.acquire(PAGE_BYTES, grow=True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({lease.address for lease in leases}) == 8
    assert pool.core.is_valid()


def test_classes_of_a_llama_like_model_are_its_shapes() -> None:
    hidden, ffn, vocabulary, layers = 4096, 14336, 128256, 32
    sizes = [vocabulary * hidden * 2] * 2
    sizes += [hidden * hidden * 2, hidden * hidden * 2] * layers  # q, o
    sizes += [1024 * hidden * 2, 1024 * hidden * 2] * layers  # k, v
    sizes += [ffn * hidden * 2] * 3 * layers
    sizes += [hidden * 2] * (2 * layers + 1)
    classes = derive_classes(sizes)
    assert [(one.slot_bytes, one.count_in_model) for one in classes] == [
        (8 * KIB, 65),
        (8 * MIB, 64),
        (32 * MIB, 64),
        (112 * MIB, 96),
        (1002 * MIB, 2),
    ]


def test_nearly_equal_sizes_share_a_class() -> None:
    classes = derive_classes([100 * PAGE_BYTES, 94 * PAGE_BYTES, 93 * PAGE_BYTES, 0])
    assert [(one.slot_bytes // PAGE_BYTES, one.count_in_model) for one in classes] == [
        (93, 1),
        (100, 2),
    ]


@given(st.lists(st.integers(0, 10**10), max_size=200))
def test_every_tensor_has_a_class_and_classes_are_few_and_distinct(sizes_bytes: list[int]) -> None:
    classes = derive_classes(sizes_bytes)
    slots = [one.slot_bytes for one in classes]
    assert len(classes) <= CLASS_COUNT_MAX
    assert slots == sorted(set(slots))
    assert len({one.name for one in classes}) == len(classes)
    assert all(slot_bytes % PAGE_BYTES == 0 for slot_bytes in slots)
    assert sum(one.count_in_model for one in classes) == sum(size > 0 for size in sizes_bytes)
    assert max(slots, default=0) >= max(sizes_bytes, default=0)


@given(st.lists(st.integers(1, 10**9), max_size=12))
def test_merging_wastes_at_most_its_share_of_a_slot(sizes_bytes: list[int]) -> None:
    slots = [one.slot_bytes for one in derive_classes(sizes_bytes)]
    for nbytes in sizes_bytes:
        slot_bytes = min(slot for slot in slots if slot >= nbytes)
        assert slot_bytes - nbytes < MERGE_WASTE_MAX * slot_bytes + PAGE_BYTES
