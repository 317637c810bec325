"""The life of a slot on the parameter path: staged, moved, let go, and never in use twice."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memascend.base.sizes import PREFETCH_BYTES_MIN
from memascend.base.units import PAGE_BYTES
from memascend.errors import StoreError
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.streaming.parameters.stream import WRITE_BACK_COUNT_MAX, ParameterStream
from tests.support.streaming_fakes import CountedPool, FakeEvent, FakeStore

NUMEL = 1024  # of float32: one page


class Bench:
    """A stream over a pool that grows; number i of the shards that are stored is filled with i."""

    def __init__(self, *, prefetch_bytes: int | None = None) -> None:
        self.store = FakeStore()
        self.pool = CountedPool()
        self.stream = ParameterStream(
            store=self.store, pool=self.pool, prefetch_bytes=prefetch_bytes
        )

    def shard(
        self, key: str, numel: int = NUMEL, dtype: torch.dtype = torch.float32, *, fill: float = 1
    ) -> Shard:
        self.store.content[key] = torch.full((numel,), fill, dtype=dtype).view(torch.uint8)
        return self.stream.shard(key, numel, dtype)

    def shards(self, keys: str) -> list[Shard]:
        return [self.shard(key, fill=index) for index, key in enumerate(keys, start=1)]

    def with_free_slots(self, count: int) -> None:
        for _ in range(count):
            self.pool.grow(PAGE_BYTES)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def value(tensor: torch.Tensor | None) -> float:
    assert tensor is not None
    assert tensor.unique().numel() == 1
    return tensor[0].item()


def states(shards: list[Shard]) -> list[ShardState]:
    return [shard.state for shard in shards]


# -- another dtype -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_shard_is_stored_in_another_dtype_and_read_in_it(
    bench: Bench, dtype: torch.dtype
) -> None:
    shard = bench.shard("a", fill=1 + 2**-12)  # which bf16 rounds
    bench.stream.recast(shard, dtype, "cpu")
    assert (shard.state, shard.dtype) == (ShardState.ABSENT, dtype)
    expected = torch.full((NUMEL,), 1 + 2**-12).to(dtype)
    assert torch.equal(bench.store.value("a", dtype), expected)
    bench.stream.read_now([shard])
    assert shard.tensor is not None
    assert torch.equal(shard.tensor, expected)


# -- reads ---------------------------------------------------------------------------------------


def test_what_is_needed_is_there_on_return(bench: Bench) -> None:
    shards = bench.shards("ab")
    bench.stream.read_now(shards)
    assert states(shards) == [ShardState.ARRIVED] * 2
    assert [value(shard.tensor) for shard in shards] == [1.0, 2.0]


def test_what_is_read_ahead_is_there_after_waiting(bench: Bench) -> None:
    shards = bench.shards("ab")
    bench.stream.prefetch(shards)
    assert states(shards) == [ShardState.READING] * 2
    assert not any(ticket.finished for ticket in bench.store.tickets)
    bench.stream.wait_reads()
    assert [value(shard.tensor) for shard in shards] == [1.0, 2.0]


def test_a_shard_named_again_is_read_once(bench: Bench) -> None:
    one, other = bench.shards("ab")
    bench.stream.prefetch([one, one])
    bench.stream.prefetch([one])
    bench.stream.read_now([one, other, one])
    assert bench.store.log() == [("read", "a"), ("read", "b")]


def test_changes_are_told_once(bench: Bench) -> None:
    one, other = bench.shards("ab")
    bench.stream.prefetch([one])
    assert list(bench.stream.take_changes()) == [one]
    bench.stream.read_now([one, other])
    assert set(bench.stream.take_changes()) == {one, other}
    bench.stream.let_go(one)
    bench.stream.let_go(one)
    assert list(bench.stream.take_changes()) == [one]
    assert list(bench.stream.take_changes()) == []


def test_a_shard_is_never_staged_twice(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    bench.stream.prefetch([shard])
    with pytest.raises(AssertionError, match="a is READING and cannot become CHANGED"):
        bench.stream.stage(shard)


def test_a_dropped_slot_serves_the_next_tensor(bench: Bench) -> None:
    one, other = bench.shards("ab")
    for shard in (one, other, one):
        bench.stream.read_now([shard])
        bench.stream.let_go(shard)
    assert bench.pool.slot_count == 1


def test_dropping_is_idempotent(bench: Bench) -> None:
    one, other = bench.shards("ab")
    bench.stream.read_now([one])
    for shard in (one, one, other):
        bench.stream.let_go(shard)
    assert states([one, other]) == [ShardState.ABSENT] * 2
    assert bench.pool.free_count == bench.pool.slot_count == 1


def test_dropping_a_read_in_flight_waits_for_it(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    bench.stream.prefetch([shard])
    bench.stream.let_go(shard)
    assert bench.store.tickets[0].finished
    assert not shard.is_staged
    bench.stream.wait_reads()
    assert bench.pool.free_count == 1


def test_a_failing_read_lets_everything_go_that_was_on_its_way(bench: Bench) -> None:
    shards = bench.shards("abcd")
    bench.store.failing |= {("read", "b"), ("read", "c")}
    with pytest.raises(StoreError, match="read of b failed"):
        bench.stream.read_now(shards)
    assert states(shards) == [ShardState.ABSENT] * 4
    assert set(bench.stream.take_changes()) == set(shards)
    assert bench.pool.free_count == 4
    bench.store.failing.clear()
    bench.stream.read_now(shards)
    assert value(shards[2].tensor) == 3.0


def test_a_read_that_cannot_be_started_lets_its_slot_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shard,) = bench.shards("a")
    refusal = StoreError(5, "an earlier write of it failed")

    def refuse(**_: object) -> None:
        raise refusal

    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "read", refuse)
        with pytest.raises(StoreError, match="earlier write"):
            bench.stream.prefetch([shard])
    assert not shard.is_staged
    bench.stream.read_now([shard])
    assert shard.state is ShardState.ARRIVED


def test_dropping_a_read_that_fails_still_gives_the_slot_back(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    bench.store.failing.add(("read", "a"))
    bench.stream.prefetch([shard])
    with pytest.raises(StoreError):
        bench.stream.let_go(shard)
    assert shard.state is ShardState.ABSENT
    assert bench.pool.free_count == 1


def test_reading_into_foreign_memory_takes_no_slot(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    target = torch.zeros(NUMEL)
    bench.stream.read_into(shard, target)
    assert value(target) == 1.0
    assert bench.pool.slot_count == 0


# -- reading ahead ---------------------------------------------------------------------------------


def ahead(bench: Bench, pages: list[int]) -> list[bool]:
    shards = [bench.shard(f"k{index}", count * NUMEL) for index, count in enumerate(pages)]
    bench.stream.prefetch(shards)
    return [shard.is_staged for shard in shards]


def test_reading_ahead_stops_at_the_first_that_does_not_fit() -> None:
    assert ahead(Bench(prefetch_bytes=10 * PAGE_BYTES), [6, 5, 1]) == [True, False, False]


def test_reading_ahead_counts_what_is_staged_already() -> None:
    bench = Bench(prefetch_bytes=2 * PAGE_BYTES)
    one, *others = bench.shards("abc")
    bench.stream.read_now([one])
    bench.stream.prefetch(others)
    assert [shard.is_staged for shard in others] == [True, False]
    bench.stream.let_go(one)
    bench.stream.prefetch(others)
    assert [shard.is_staged for shard in others] == [True, True]


def test_reading_ahead_of_nothing_allowed_reads_nothing() -> None:
    assert ahead(Bench(prefetch_bytes=0), [1]) == [False]


@given(st.lists(st.integers(1, 10), max_size=10), st.integers(0, 40))
def test_reading_ahead_takes_a_prefix_within_the_limit(pages: list[int], limit: int) -> None:
    taken = ahead(Bench(prefetch_bytes=limit * PAGE_BYTES), pages)
    count = sum(taken)
    assert taken == [True] * count + [False] * (len(pages) - count)
    assert sum(pages[:count]) <= limit
    if count < len(pages):
        assert sum(pages[: count + 1]) > limit


def test_the_limit_follows_the_layers_not_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PREFETCH_BYTES_MIN == 32 << 20
    monkeypatch.setattr(
        "memascend.streaming.parameters.prefetch.PREFETCH_BYTES_MIN", 3 * PAGE_BYTES
    )
    bench = Bench()
    embedding = [bench.shard(name, 40 * NUMEL) for name in ("embedding", "head")]
    assert ahead(bench, [1] * 2) == [True] * 2
    bench.stream.drop_all()
    assert ahead(bench, [5] * 3) == [True, True, False]
    assert not any(shard.is_staged for shard in embedding)


# -- writes --------------------------------------------------------------------------------------


def test_a_written_shard_is_in_the_store_on_return_and_lets_go(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    slot = bench.stream.stage(shard)
    assert slot is not None
    slot.fill_(7)
    bench.stream.write(shard)
    assert value(bench.store.value("a", torch.float32)) == 7.0
    assert not shard.is_staged
    gc.collect()
    assert bench.pool.free_count == 1


def test_a_failing_write_is_raised_and_lets_go(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    bench.store.failing.add(("write", "a"))
    bench.stream.stage(shard)
    with pytest.raises(StoreError, match="write of a failed"):
        bench.stream.write(shard)
    assert not shard.is_staged


def test_the_source_of_a_cast_may_be_reused_on_return(bench: Bench) -> None:
    shard = bench.shard("a", dtype=torch.bfloat16)
    source = torch.full((NUMEL,), 3.0)
    bench.stream.write_cast(shard, source)
    source.fill_(9)
    bench.stream.wait_writes()
    assert bench.store.content["a"].nbytes == 2 * NUMEL
    assert value(bench.store.value("a", torch.bfloat16)) == 3.0


def test_a_slot_is_not_reused_before_its_write_has_finished(bench: Bench) -> None:
    bench.pool.slot_count_max = 1
    shards = bench.shards("abcdef")
    for index, shard in enumerate(shards):
        bench.stream.write_cast(shard, torch.full((NUMEL,), 10.0 * index))
    bench.stream.wait_writes()
    stored = [value(bench.store.value(shard.key, shard.dtype)) for shard in shards]
    assert stored == [0, 10, 20, 30, 40, 50]


def test_writes_in_flight_are_limited_and_end_in_order(bench: Bench) -> None:
    shards = [bench.shard(f"k{index}") for index in range(3 * WRITE_BACK_COUNT_MAX)]
    bench.with_free_slots(2 * WRITE_BACK_COUNT_MAX)
    in_flight_peak = 0
    for index, shard in enumerate(shards):
        bench.stream.write_cast(shard, torch.ones(NUMEL))
        in_flight = [ticket.key for ticket in bench.store.tickets if not ticket.finished]
        assert in_flight == [f"k{i}" for i in range(index + 1)][-len(in_flight) :]
        in_flight_peak = max(in_flight_peak, len(in_flight))
    assert in_flight_peak == WRITE_BACK_COUNT_MAX
    assert bench.store.log() == [("write", shard.key) for shard in shards]


def test_the_store_may_use_the_whole_slot_so_that_odd_tails_need_no_bounce(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    bench.stream.write_cast(shard, torch.ones(NUMEL))
    bench.stream.read_now([shard])
    assert shard.lease is not None
    slot_bytes = shard.lease.slot_bytes
    assert slot_bytes >= shard.nbytes
    assert [ticket.capacity_bytes for ticket in bench.store.tickets] == [slot_bytes] * 2


def test_a_read_sees_the_write_before_it(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    bench.stream.write_cast(shard, torch.full((NUMEL,), 5.0))
    bench.stream.read_now([shard])
    assert value(shard.tensor) == 5.0


def test_ctrl_c_leaves_the_writes_noted_that_were_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.with_free_slots(3)
    for shard in bench.shards("abc"):
        bench.stream.write_cast(shard, torch.ones(NUMEL))
    first = bench.store.tickets[0]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.stream.wait_writes()
    assert [ticket.finished for ticket in bench.store.tickets] == [False] * 3
    bench.stream.wait_writes()  # the interrupted one too
    assert [ticket.finished for ticket in bench.store.tickets] == [True] * 3


def test_waiting_for_writes_raises_the_first_error_after_all_of_them(bench: Bench) -> None:
    bench.with_free_slots(4)
    bench.store.failing |= {("write", "b"), ("write", "c")}
    for shard in bench.shards("abcd"):
        bench.stream.write_cast(shard, torch.ones(NUMEL))
    with pytest.raises(StoreError, match="write of b failed"):
        bench.stream.wait_writes()
    assert all(ticket.finished for ticket in bench.store.tickets)
    bench.stream.wait_writes()


# -- events --------------------------------------------------------------------------------------


def test_a_slot_is_not_reused_before_its_event_has_passed(bench: Bench) -> None:
    one, other = bench.shards("ab")
    event = FakeEvent()
    bench.stream.read_now([one])
    bench.stream.let_go(one, event)
    assert bench.pool.free_count == 0
    bench.stream.read_now([other])
    # Rather than grow, it waited for the copy.
    assert event.wait_count == 1
    assert bench.pool.slot_count == 1


def test_a_passed_event_frees_its_slot_without_waiting(bench: Bench) -> None:
    one, other = bench.shards("ab")
    event = FakeEvent()
    bench.stream.read_now([one])
    bench.stream.let_go(one, event)
    event.passed = True
    bench.stream.read_now([other])
    assert event.wait_count == 0
    assert bench.pool.slot_count == 1


def test_events_of_other_sizes_are_not_waited_for(bench: Bench) -> None:
    small, large = bench.shard("small"), bench.shard("large", 100 * NUMEL)
    event = FakeEvent()
    bench.stream.read_now([small])
    bench.stream.let_go(small, event)
    bench.stream.read_now([large])
    assert event.wait_count == 0
    assert bench.pool.slot_count == 2


def test_slots_behind_a_mix_of_sizes_come_back_and_the_pool_stays_small(bench: Bench) -> None:
    small, large = bench.shard("small"), bench.shard("large", 100 * NUMEL)
    for _ in range(10):
        for shard in (large, small):
            bench.stream.read_now([shard])
            bench.stream.let_go(shard, FakeEvent())
    assert bench.pool.slot_count <= 3


def test_dropping_again_with_an_event_does_not_retire_twice(bench: Bench) -> None:
    (shard,) = bench.shards("a")
    event = FakeEvent()
    bench.stream.read_now([shard])
    for again in (event, event, None):
        bench.stream.let_go(shard, again)
    assert bench.pool.free_count == 0
    bench.stream.drop_all()
    assert event.wait_count == 1
    assert bench.pool.free_count == 1
