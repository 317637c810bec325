"""The life of a slot on the parameter path: staged, moved, let go, and never in use twice."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memascend.errors import StoreError
from memascend.streaming.budget import PREFETCH_BYTES_MIN, derive_prefetch_bytes
from memascend.streaming.parameters import WRITE_BACK_COUNT_MAX, ParameterStream
from tests.support.streaming_fakes import FakeEvent, FakePool, FakeStore

NUMEL = 1024  # of float32: one page


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def stream(store: FakeStore, pool: FakePool) -> ParameterStream:
    return ParameterStream(store=store, pool=pool)


def put(store: FakeStore, *keys: str) -> None:
    for index, key in enumerate(keys):
        store.content[key] = torch.full((NUMEL,), float(index + 1))


def with_free_slots(pool: FakePool, count: int) -> None:
    for _ in range(count):
        pool.grow(NUMEL * 4)


def value(tensor: torch.Tensor) -> float:
    assert tensor.unique().numel() == 1
    return tensor[0].item()


# -- reads ---------------------------------------------------------------------------------------


def test_what_was_read_is_there_after_waiting(stream: ParameterStream, store: FakeStore) -> None:
    put(store, "a", "b")
    stream.read("a", NUMEL, torch.float32)
    stream.read("b", NUMEL, torch.float32)
    assert stream.wait_reads() == ["a", "b"]
    assert (value(stream.staged_tensor("a")), value(stream.staged_tensor("b"))) == (1.0, 2.0)
    assert stream.staged_keys() == ("a", "b")
    assert stream.wait_reads() == []


def test_a_key_is_never_staged_twice(stream: ParameterStream, store: FakeStore) -> None:
    put(store, "a")
    stream.read("a", NUMEL, torch.float32)
    with pytest.raises(AssertionError, match="a is staged already"):
        stream.stage("a", NUMEL, torch.float32)


def test_a_dropped_slot_serves_the_next_tensor(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a", "b")
    for key in ("a", "b", "a"):
        stream.read(key, NUMEL, torch.float32)
        stream.wait_reads()
        stream.drop(key)
    assert pool.slot_count == 1


def test_dropping_is_idempotent(stream: ParameterStream, store: FakeStore, pool: FakePool) -> None:
    put(store, "a")
    stream.read("a", NUMEL, torch.float32)
    stream.wait_reads()
    stream.drop("a")
    stream.drop("a")
    stream.drop("never seen")
    assert [lease.release_count for lease in pool.leases] == [1]


def test_dropping_a_read_in_flight_waits_for_it(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a")
    stream.read("a", NUMEL, torch.float32)
    stream.drop("a")
    assert store.tickets[0].finished
    assert not stream.is_staged("a")
    assert stream.wait_reads() == []
    assert pool.free_count == 1


def test_a_failing_read_lets_its_slot_go_and_the_others_arrive(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a", "b", "c")
    store.failing.add(("read", "b"))
    for key in "abc":
        stream.read(key, NUMEL, torch.float32)
    with pytest.raises(StoreError, match="read of b failed"):
        stream.wait_reads()
    assert not stream.is_staged("b")
    assert stream.wait_reads() == ["c"]
    assert value(stream.staged_tensor("c")) == 3.0
    assert pool.free_count == 1


def test_a_read_that_cannot_be_started_lets_its_slot_go(
    stream: ParameterStream, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "a")
    refusal = StoreError(5, "an earlier write of it failed")

    def refuse(**_: object) -> None:
        raise refusal

    with monkeypatch.context() as patch:
        patch.setattr(store, "read", refuse)
        with pytest.raises(StoreError, match="earlier write"):
            stream.read("a", NUMEL, torch.float32)
    assert not stream.is_staged("a")
    stream.read("a", NUMEL, torch.float32)
    assert stream.wait_reads() == ["a"]


def test_dropping_a_read_that_fails_still_gives_the_slot_back(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a")
    store.failing.add(("read", "a"))
    stream.read("a", NUMEL, torch.float32)
    with pytest.raises(StoreError):
        stream.drop("a")
    assert not stream.is_staged("a")
    assert [lease.release_count for lease in pool.leases] == [1]


def test_reading_into_foreign_memory_takes_no_slot(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a")
    target = torch.zeros(NUMEL)
    stream.read_into("a", target)
    assert value(target) == 1.0
    assert pool.slot_count == 0


# -- prefetching ---------------------------------------------------------------------------------


def test_prefetch_stops_at_the_first_that_does_not_fit(store: FakeStore, pool: FakePool) -> None:
    stream = ParameterStream(store=store, pool=pool, prefetch_bytes=100)
    wanted = [("a", 60), ("b", 41), ("c", 10)]
    assert list(stream.admit_prefetch(wanted)) == ["a"]
    assert list(stream.admit_prefetch(wanted[2:])) == ["c"]


def test_prefetch_counts_what_is_staged_already(store: FakeStore, pool: FakePool) -> None:
    stream = ParameterStream(store=store, pool=pool, prefetch_bytes=NUMEL * 4 + 10)
    put(store, "a")
    stream.read("a", NUMEL, torch.float32)
    assert list(stream.admit_prefetch([("b", 11)])) == []
    stream.drop("a")
    assert list(stream.admit_prefetch([("b", 11)])) == ["b"]


def test_prefetch_of_nothing_allowed_admits_nothing(store: FakeStore, pool: FakePool) -> None:
    stream = ParameterStream(store=store, pool=pool, prefetch_bytes=0)
    assert list(stream.admit_prefetch([("a", 1)])) == []


@given(st.lists(st.integers(1, 1000), max_size=20), st.integers(0, 4000))
def test_prefetch_admits_a_prefix_within_the_limit(sizes: list[int], limit: int) -> None:
    stream = ParameterStream(store=FakeStore(), pool=FakePool(), prefetch_bytes=limit)
    wanted = [(str(index), nbytes) for index, nbytes in enumerate(sizes)]
    admitted = list(stream.admit_prefetch(wanted))
    assert admitted == [key for key, _ in wanted[: len(admitted)]]
    assert sum(sizes[: len(admitted)]) <= limit
    if len(admitted) < len(wanted):
        assert sum(sizes[: len(admitted) + 1]) > limit


def test_the_limit_follows_the_layers_not_the_embedding() -> None:
    layer, embedding = PREFETCH_BYTES_MIN, 40 * PREFETCH_BYTES_MIN
    assert derive_prefetch_bytes([embedding, embedding, *[layer] * 3]) == 2 * layer
    assert derive_prefetch_bytes([embedding]) == PREFETCH_BYTES_MIN
    assert derive_prefetch_bytes([]) == PREFETCH_BYTES_MIN


# -- writes --------------------------------------------------------------------------------------


def test_a_written_key_is_in_the_store_on_return_and_lets_go(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    stream.stage("a", NUMEL, torch.float32).fill_(7)
    stream.write("a")
    assert value(store.content["a"]) == 7.0
    assert not stream.is_staged("a")
    gc.collect()
    assert pool.free_count == 1


def test_a_failing_write_is_raised_and_lets_go(stream: ParameterStream, store: FakeStore) -> None:
    store.failing.add(("write", "a"))
    stream.stage("a", NUMEL, torch.float32)
    with pytest.raises(StoreError, match="write of a failed"):
        stream.write("a")
    assert not stream.is_staged("a")


def test_the_source_of_a_cast_may_be_reused_on_return(
    stream: ParameterStream, store: FakeStore
) -> None:
    source = torch.ones(NUMEL)
    stream.write_cast("a", source, torch.bfloat16)
    source.fill_(9)
    stream.wait_writes()
    assert store.content["a"].dtype is torch.bfloat16
    assert value(store.content["a"]) == 1.0


def test_a_slot_is_not_reused_before_its_write_has_finished(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    pool.slot_count_max = 1
    for index in range(6):
        stream.write_cast(f"k{index}", torch.full((NUMEL,), float(index)), torch.float32)
    stream.wait_writes()
    assert [value(store.content[f"k{index}"]) for index in range(6)] == [0, 1, 2, 3, 4, 5]


def test_writes_in_flight_are_limited_and_end_in_order(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    count = 3 * WRITE_BACK_COUNT_MAX
    with_free_slots(pool, 2 * WRITE_BACK_COUNT_MAX)
    in_flight_peak = 0
    for index in range(count):
        stream.write_cast(f"k{index}", torch.ones(NUMEL), torch.float32)
        in_flight = [ticket.key for ticket in store.tickets if not ticket.finished]
        assert in_flight == [f"k{i}" for i in range(index + 1)][-len(in_flight) :]
        in_flight_peak = max(in_flight_peak, len(in_flight))
    assert in_flight_peak == WRITE_BACK_COUNT_MAX
    assert store.log() == [("write", f"k{index}") for index in range(count)]


def test_a_read_sees_the_write_before_it(stream: ParameterStream, store: FakeStore) -> None:
    stream.write_cast("a", torch.full((NUMEL,), 5.0), torch.float32)
    stream.read("a", NUMEL, torch.float32)
    stream.wait_reads()
    assert value(stream.staged_tensor("a")) == 5.0


def test_waiting_for_writes_raises_the_first_error_after_all_of_them(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    with_free_slots(pool, 4)
    store.failing |= {("write", "b"), ("write", "c")}
    for key in "abcd":
        stream.write_cast(key, torch.ones(NUMEL), torch.float32)
    with pytest.raises(StoreError, match="write of b failed"):
        stream.wait_writes()
    assert all(ticket.finished for ticket in store.tickets)
    stream.wait_writes()


# -- events --------------------------------------------------------------------------------------


def test_a_slot_is_not_reused_before_its_event_has_passed(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a", "b")
    event = FakeEvent()
    stream.read("a", NUMEL, torch.float32)
    stream.wait_reads()
    stream.drop("a", event)
    assert pool.free_count == 0
    stream.read("b", NUMEL, torch.float32)
    # Rather than grow, it waited for the copy.
    assert event.wait_count == 1
    assert pool.slot_count == 1


def test_a_passed_event_frees_its_slot_without_waiting(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a", "b")
    event = FakeEvent()
    stream.read("a", NUMEL, torch.float32)
    stream.wait_reads()
    stream.drop("a", event)
    event.passed = True
    stream.read("b", NUMEL, torch.float32)
    assert event.wait_count == 0
    assert pool.slot_count == 1


def test_events_of_other_sizes_are_not_waited_for(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a")
    store.content["large"] = torch.ones(100 * NUMEL)
    event = FakeEvent()
    stream.read("a", NUMEL, torch.float32)
    stream.wait_reads()
    stream.drop("a", event)
    stream.read("large", 100 * NUMEL, torch.float32)
    assert event.wait_count == 0
    assert pool.slot_count == 2


def test_slots_behind_a_mix_of_sizes_come_back_and_the_pool_stays_small(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "small")
    store.content["large"] = torch.ones(100 * NUMEL)
    for _ in range(10):
        for key, numel in (("large", 100 * NUMEL), ("small", NUMEL)):
            stream.read(key, numel, torch.float32)
            stream.wait_reads()
            stream.drop(key, FakeEvent())
    assert pool.slot_count <= 3


def test_dropping_again_with_an_event_does_not_retire_twice(
    stream: ParameterStream, store: FakeStore, pool: FakePool
) -> None:
    put(store, "a")
    event = FakeEvent()
    stream.read("a", NUMEL, torch.float32)
    stream.wait_reads()
    stream.drop("a", event)
    stream.drop("a", event)
    stream.drop("a")
    assert [lease.release_count for lease in pool.leases] == [0]
