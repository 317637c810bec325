"""Parameters within a byte budget: chunks for what has no slot, and one choice for every rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.base.units import PAGE_BYTES
from memascend.errors import StoreError
from memascend.memory.pool import Pool
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.examples import examples
from tests.support.parameter_bench import BUDGET_BYTES, LARGEST, PAGE, Bench
from tests.support.streaming_fakes import FakeEvent, FakeMemory, LateDevice


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- large shards --------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [LARGEST + 1, 3 * LARGEST, 10 * LARGEST + 3])
def test_a_large_shard_is_assembled_without_a_slot(bench: Bench, numel: int) -> None:
    shard, content = bench.new("a", numel)
    assert torch.equal(bench.fetch(shard), content)
    assert shard.lease is None
    assert bench.memory.taken == []
    bench.stream.let_go(shard)
    assert not shard.is_staged


def test_the_largest_slot_still_is_a_slot(bench: Bench) -> None:
    shard, content = bench.new("a", LARGEST)
    assert torch.equal(bench.fetch(shard), content)
    assert shard.lease is not None


def test_a_large_shard_is_stored_in_chunks_and_is_there_on_return(bench: Bench) -> None:
    content = torch.randn(5 * LARGEST)
    shard = bench.stream.shard("a", content.numel(), content.dtype)
    assert bench.stream.stage(shard) is None
    assert not shard.is_staged
    bench.stream.write_from(shard, content)
    assert all(ticket.finished for ticket in bench.store.tickets)
    assert torch.equal(bench.store.value("a", torch.float32), content)


def test_a_large_update_is_cast_on_its_way(bench: Bench) -> None:
    source = torch.randn(9 * LARGEST)
    expected = source.bfloat16()
    shard = bench.stream.shard("a", source.numel(), torch.bfloat16)
    bench.stream.write_cast(shard, source)
    source.zero_()
    assert torch.equal(bench.fetch(shard), expected)
    bench.stream.wait_writes()


def test_a_failed_chunk_of_an_update_is_raised_at_the_end_of_the_step(bench: Bench) -> None:
    shard, content = bench.new("a", 5 * LARGEST)
    bench.store.failing.add(("write", "a"))
    bench.stream.write_cast(shard, content)
    with pytest.raises(StoreError, match="write of a"):
        bench.stream.wait_writes()
    bench.stream.wait_writes()


def test_a_failed_chunk_of_a_shard_is_raised_at_once(bench: Bench) -> None:
    shard, content = bench.new("a", 5 * LARGEST)
    bench.store.failing.add(("write", "a"))
    with pytest.raises(StoreError, match="write of a"):
        bench.stream.write_from(shard, content)


def test_a_large_read_that_fails_lets_go(bench: Bench) -> None:
    shard, _ = bench.new("a", 5 * LARGEST)
    bench.store.failing.add(("read", "a"))
    with pytest.raises(StoreError, match="read of a"):
        bench.stream.read_now([shard])
    assert not shard.is_staged


# -- memory ----------------------------------------------------------------------------------------


def test_updates_of_any_number_stay_within_the_budget(bench: Bench) -> None:
    for index in range(200):
        shard, _ = bench.new(f"k{index}")
        bench.stream.write_cast(shard, torch.full((PAGE,), float(index)))
    bench.stream.wait_writes()
    assert bench.pool.held_bytes <= BUDGET_BYTES
    assert [bench.store.value(f"k{i}", torch.float32)[0] for i in range(200)] == list(range(200))


def test_copies_of_any_size_are_waited_for_before_a_shard_goes_without_a_slot(
    bench: Bench,
) -> None:
    events = [FakeEvent() for _ in range(16)]
    for number, event in enumerate(events):
        shard, _ = bench.new(f"a{number}")
        bench.fetch(shard)
        bench.stream.let_go(shard, event)
    assert bench.pool.free_bytes == 0
    large, content = bench.new("b", LARGEST)
    assert torch.equal(bench.fetch(large), content)
    assert large.lease is not None
    assert sum(event.wait_count for event in events) >= 4


def test_what_no_copy_will_free_sends_a_shard_to_the_device(bench: Bench) -> None:
    """Shards in a collective hold their slots until it is waited for, which may be later."""
    shards = [bench.new(f"k{i}", LARGEST) for i in range(7)]
    for shard, _ in shards:
        bench.fetch(shard)
    assert [shard.lease is not None for shard, _ in shards] == [True] * 4 + [False] * 3
    for shard, content in shards:
        assert shard.tensor is not None
        assert torch.equal(shard.tensor, content)


def test_without_room_an_outgoing_shard_is_the_callers(bench: Bench) -> None:
    staged = [bench.stream.stage(bench.new(f"k{index}", LARGEST)[0]) for index in range(5)]
    assert [slot is None for slot in staged] == [False] * 4 + [True]


def test_a_staged_device_tensor_can_be_stored(bench: Bench) -> None:
    shard, content = bench.new("a", 5 * LARGEST)
    bench.fetch(shard).mul_(2)
    bench.stream.write(shard)
    assert torch.equal(bench.store.value("a", torch.float32), content * 2)


def test_a_shard_read_through_a_slot_sees_the_chunks_written_before() -> None:
    """Whether a shard finds a slot may change from one transfer to the next."""
    device = LateDevice()
    bench = Bench(device=device)
    with device:
        shard = bench.put("a", torch.zeros(PAGE))
        others = [bench.new(f"k{index}", LARGEST)[0] for index in range(4)]
        for other in others:
            assert bench.stream.stage(other) is not None
        bench.stream.write_cast(shard, device.tensor(torch.ones(PAGE)))
        for other in others:
            bench.stream.let_go(other)
        assert bench.fetch(shard).tolist() == [1.0] * PAGE
        assert shard.lease is not None


# -- reading ahead ---------------------------------------------------------------------------------


def test_reading_ahead_passes_over_large_shards(bench: Bench) -> None:
    numels = {"a": PAGE, "large": BUDGET_BYTES // 4, "b": PAGE}
    shards = [bench.new(key, numel)[0] for key, numel in numels.items()]
    bench.stream.prefetch(shards)
    assert [shard.is_staged for shard in shards] == [True, False, True]


@pytest.mark.parametrize(("prefetch_bytes", "count"), [(None, 8), (3 * PAGE_BYTES, 3)])
def test_reading_ahead_takes_half_of_the_budget_at_most(
    prefetch_bytes: int | None, count: int
) -> None:
    bench = Bench(prefetch_bytes=prefetch_bytes)
    shards = [bench.new(str(index), 1)[0] for index in range(100)]  # each takes a page
    bench.stream.prefetch(shards)
    assert [shard.is_staged for shard in shards] == [True] * count + [False] * (100 - count)


def test_room_is_made_by_letting_go_what_is_needed_last() -> None:
    bench = Bench()
    ahead = [bench.new(f"k{index}", PAGE)[0] for index in range(8)]
    bench.stream.prefetch(ahead)
    bench.stream.read_now([ahead[7]])
    numels = [8 * PAGE, LARGEST + 1, PAGE, 2 * PAGE]
    gone = []
    for number, numel in enumerate(numels):
        needed = [bench.new(f"n{number}.{i}", part)[0] for i, part in enumerate(cut(numel))]
        bench.stream.read_now(needed)
        gone.append([int(shard.key[1:]) for shard in ahead if not shard.is_staged])
    assert gone == [[], [], [6], [4, 5, 6]]  # the second has no slot anyway


def cut(numel: int) -> list[int]:
    """Shards of the largest size that has a slot, or one that has none."""
    return [LARGEST] * (numel // LARGEST) if numel % LARGEST == 0 else [numel]


def test_letting_go_of_a_read_that_fails_is_no_error(bench: Bench) -> None:
    shard, _ = bench.new("a")
    bench.store.failing.add(("read", "a"))
    bench.stream.prefetch([shard])
    needed = [bench.new(f"k{index}", LARGEST)[0] for index in range(4)]
    bench.stream.read_now(needed)
    assert shard.state is ShardState.ABSENT
    assert all(one.lease is not None for one in needed)


def test_what_is_needed_is_waited_for_alone(bench: Bench) -> None:
    shards = [bench.new(key)[0] for key in "ab"]
    bench.stream.prefetch(shards)
    bench.stream.read_now(shards[1:])
    assert [shard.state for shard in shards] == [ShardState.READING, ShardState.ARRIVED]
    assert [ticket.finished for ticket in bench.store.tickets] == [False, True]


class MeanPool(Pool):
    """Has room or not as chance wills, as fragments and the pace of copies do."""

    def __init__(self, seed: int) -> None:
        super().__init__(memory=FakeMemory(), component="slots", budget_bytes=BUDGET_BYTES)
        self._chance = random.Random(seed)

    def acquire(self, nbytes: int) -> Any:
        return super().acquire(nbytes) if self._chance.random() < 0.5 else None


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ahead", "need", "update", "drop"]),
            st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True),
        ),
        max_size=30,
    ),
    st.integers(0, 1000),
)
def test_what_is_staged_does_not_depend_on_where_it_found_room(
    calls: list[tuple[str, list[int]]], seed: int
) -> None:
    """DeepSpeed gathers by it: ranks that differed would wait for each other for ever."""
    benches = [Bench(), Bench(pool=MeanPool(seed))]
    numels = [PAGE * (1 + number % 6) - number for number in range(12)]
    contents = [torch.full((numel,), float(i)) for i, numel in enumerate(numels)]
    shards = [
        [bench.put(f"k{i}", content) for i, content in enumerate(contents)] for bench in benches
    ]
    for stamp, (kind, numbers) in enumerate(calls):
        for bench, own in zip(benches, shards, strict=True):
            call(bench.stream, kind, [own[number] for number in numbers], float(stamp))
        seen = [[shard.is_staged for shard in own] for own in shards]
        assert seen[0] == seen[1]
        changes = [{shard.key for shard in bench.stream.take_changes()} for bench in benches]
        assert changes[0] == changes[1]
        assert benches[0].pool.held_bytes <= BUDGET_BYTES
        if kind == "update":
            for number in numbers:
                contents[number] = torch.full((numels[number],), float(stamp))
    for bench, own in zip(benches, shards, strict=True):
        bench.stream.wait_reads()
        for shard, content in zip(own, contents, strict=True):
            if shard.is_staged:
                assert shard.tensor is not None
                assert torch.equal(shard.tensor, content)


def call(stream: ParameterStream, kind: str, shards: list[Shard], stamp: float) -> None:
    if kind == "ahead":
        stream.prefetch(shards)
    elif kind == "need":
        stream.read_now(shards)
    elif kind == "update":
        for shard in shards:
            stream.write_cast(shard, torch.full((shard.numel,), stamp))
    else:
        for shard in shards:
            stream.let_go(shard)


# -- without a wait ------------------------------------------------------------------------------


def test_a_shard_has_arrived_when_nothing_is_left_to_wait_for(bench: Bench) -> None:
    shard, _ = bench.new("a")
    assert not bench.stream.has_arrived(shard)  # nobody has asked for it
    bench.stream.prefetch([shard])
    assert not bench.stream.has_arrived(shard)
    bench.store.tickets[-1].finish()
    assert bench.stream.has_arrived(shard)
    bench.fetch(shard)
    assert bench.stream.has_arrived(shard)
    bench.stream.let_go(shard)
    assert shard.state is ShardState.KEPT
    assert bench.stream.has_arrived(shard)
    bench.stream.drop(shard)
    assert not bench.stream.has_arrived(shard)


def test_one_without_a_slot_never_arrives_before_it_is_needed(bench: Bench) -> None:
    held = [bench.new(f"k{index}", LARGEST)[0] for index in range(4)]
    bench.stream.read_now(held)
    late, _ = bench.new("late", LARGEST)
    bench.stream._read(late)  # as where several collectives are in flight
    assert late.lease is None
    assert not bench.stream.has_arrived(late)
    bench.fetch(late)
    assert bench.stream.has_arrived(late)
