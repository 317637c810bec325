"""Parameters within a byte budget: chunks for what has no slot, and one choice for every rank."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend.errors import StoreError
from memascend.memory.budget import PAGE_BYTES, BudgetSlots
from memascend.streaming.budget import Budget
from memascend.streaming.parameters import ParameterStream
from memascend.streaming.staging import StagingSlots
from tests.support.examples import examples
from tests.support.streaming_fakes import FakeEvent, FakeMemory, FakeRangeStore, LateDevice

BUDGET_BYTES = 16 * PAGE_BYTES
LARGEST = BUDGET_BYTES // 4 // 4  # elements of float32 in the largest slot
PAGE = PAGE_BYTES // 4  # elements in a page


class Bench:
    """A stream within a budget; the store is a dict and staging slots are small."""

    def __init__(
        self,
        *,
        prefetch_bytes: int | None = None,
        device: LateDevice | None = None,
        pool: Any = None,
    ) -> None:
        self.store = FakeRangeStore()
        self.memory = FakeMemory()
        self.pool = pool or BudgetSlots(memory=self.memory, budget_bytes=BUDGET_BYTES)
        self.staging = StagingSlots(
            store=self.store,
            memory=FakeMemory(),
            slot_bytes=PAGE_BYTES,
            slot_count=3,
            new_event=None if device is None else device.new_event,
        )
        budget = Budget(
            nbytes=BUDGET_BYTES,
            slot_bytes_max=BUDGET_BYTES // 4,
            page_bytes=PAGE_BYTES,
            staging=self.staging,
            device=torch.device("cpu"),
        )
        self.stream = ParameterStream(
            store=self.store, pool=self.pool, prefetch_bytes=prefetch_bytes, budget=budget
        )

    def put(self, key: str, content: torch.Tensor) -> torch.Tensor:
        self.store.content[key] = content.view(torch.uint8).clone()
        return content

    def fetch(self, key: str, like: torch.Tensor) -> torch.Tensor:
        self.stream.read(key, like.numel(), like.dtype)
        assert key in self.stream.wait_reads([key])
        return self.stream.staged_tensor(key)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# -- large shards --------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [LARGEST + 1, 3 * LARGEST, 10 * LARGEST + 3])
def test_a_large_shard_is_assembled_without_a_slot(bench: Bench, numel: int) -> None:
    content = bench.put("a", torch.randn(numel))
    assert torch.equal(bench.fetch("a", content), content)
    assert not bench.stream.is_in_slot("a")
    assert bench.memory.taken == []
    bench.stream.drop("a")
    assert not bench.stream.is_staged("a")


def test_the_largest_slot_still_is_a_slot(bench: Bench) -> None:
    content = bench.put("a", torch.randn(LARGEST))
    assert torch.equal(bench.fetch("a", content), content)
    assert bench.stream.is_in_slot("a")


def test_a_large_shard_is_stored_in_chunks_and_is_there_on_return(bench: Bench) -> None:
    content = torch.randn(5 * LARGEST)
    assert bench.stream.stage("a", content.numel(), content.dtype) is None
    assert not bench.stream.is_staged("a")
    bench.stream.write_from("a", content)
    assert all(ticket.finished for ticket in bench.store.tickets)
    assert torch.equal(bench.store.value("a", torch.float32), content)


def test_a_large_update_is_cast_on_its_way(bench: Bench) -> None:
    source = torch.randn(9 * LARGEST)
    expected = source.bfloat16()
    bench.stream.write_cast("a", source, torch.bfloat16)
    source.zero_()
    assert torch.equal(bench.fetch("a", expected), expected)
    bench.stream.wait_writes()


def test_a_failed_chunk_of_an_update_is_told_at_the_end_of_the_step(bench: Bench) -> None:
    bench.store.failing.add(("write", "a"))
    bench.stream.write_cast("a", torch.zeros(5 * LARGEST), torch.float32)
    with pytest.raises(StoreError, match="write of a"):
        bench.stream.wait_writes()
    bench.stream.wait_writes()


def test_a_failed_chunk_of_a_shard_is_told_at_once(bench: Bench) -> None:
    bench.store.failing.add(("write", "a"))
    with pytest.raises(StoreError, match="write of a"):
        bench.stream.write_from("a", torch.zeros(5 * LARGEST))


def test_a_large_read_that_fails_lets_go(bench: Bench) -> None:
    bench.put("a", torch.zeros(5 * LARGEST))
    bench.store.failing.add(("read", "a"))
    bench.stream.read("a", 5 * LARGEST, torch.float32)
    with pytest.raises(StoreError, match="read of a"):
        bench.stream.wait_reads()
    assert not bench.stream.is_staged("a")


# -- memory ----------------------------------------------------------------------------------------


def test_updates_of_any_number_stay_within_the_budget(bench: Bench) -> None:
    for index in range(200):
        bench.stream.write_cast(f"k{index}", torch.full((PAGE,), float(index)), torch.float32)
    bench.stream.wait_writes()
    assert bench.pool.held_bytes <= BUDGET_BYTES
    assert [bench.store.value(f"k{i}", torch.float32)[0] for i in range(200)] == list(range(200))


def test_copies_of_any_size_are_waited_for_before_a_shard_goes_without_a_slot(
    bench: Bench,
) -> None:
    events = [FakeEvent() for _ in range(16)]
    for number, event in enumerate(events):
        bench.fetch(f"a{number}", bench.put(f"a{number}", torch.randn(PAGE)))
        bench.stream.drop(f"a{number}", event)
    assert bench.pool.free_bytes == 0
    large = bench.put("b", torch.randn(LARGEST))
    assert torch.equal(bench.fetch("b", large), large)
    assert bench.stream.is_in_slot("b")
    assert sum(event.wait_count for event in events) >= 4


def test_what_no_copy_will_free_sends_a_shard_to_the_device(bench: Bench) -> None:
    """Shards in a collective hold their slots until it is waited for, which may be later."""
    contents = {f"k{i}": bench.put(f"k{i}", torch.randn(LARGEST)) for i in range(7)}
    for key, content in contents.items():
        bench.fetch(key, content)
    assert [bench.stream.is_in_slot(key) for key in contents] == [True] * 4 + [False] * 3
    for key, content in contents.items():
        assert torch.equal(bench.stream.staged_tensor(key), content)


def test_without_room_an_outgoing_shard_is_the_callers(bench: Bench) -> None:
    for index in range(4):
        assert bench.stream.stage(f"k{index}", LARGEST, torch.float32) is not None
    assert bench.stream.stage("k4", LARGEST, torch.float32) is None


def test_a_staged_device_tensor_can_be_stored(bench: Bench) -> None:
    content = bench.put("a", torch.randn(5 * LARGEST))
    bench.fetch("a", content).mul_(2)
    bench.stream.write("a")
    assert torch.equal(bench.store.value("a", torch.float32), content * 2)


def test_a_shard_read_through_a_slot_sees_the_chunks_written_before() -> None:
    """Whether a shard finds a slot may change from one transfer to the next."""
    device = LateDevice()
    bench = Bench(device=device)
    with device:
        bench.put("a", torch.zeros(PAGE))
        for index in range(4):
            assert bench.stream.stage(f"k{index}", LARGEST, torch.float32) is not None
        bench.stream.write_cast("a", device.tensor(torch.ones(PAGE)), torch.float32)
        for index in range(4):
            bench.stream.drop(f"k{index}")
        bench.stream.read("a", PAGE, torch.float32)
        assert bench.stream.is_in_slot("a")
        bench.stream.wait_reads()
        assert bench.stream.staged_tensor("a").tolist() == [1.0] * PAGE


# -- reading ahead ---------------------------------------------------------------------------------


def test_reading_ahead_passes_over_large_shards(bench: Bench) -> None:
    wanted = [("a", PAGE_BYTES), ("large", BUDGET_BYTES), ("b", PAGE_BYTES)]
    assert list(bench.stream.admit_prefetch(wanted)) == ["a", "b"]


def test_reading_ahead_takes_half_of_the_budget_at_most(bench: Bench) -> None:
    wanted = [(str(index), 1) for index in range(100)]  # each takes a page
    assert len(list(bench.stream.admit_prefetch(wanted))) == 8
    small = Bench(prefetch_bytes=3 * PAGE_BYTES)
    assert len(list(small.stream.admit_prefetch(wanted))) == 3


def test_room_is_made_by_letting_go_what_is_needed_last(bench: Bench) -> None:
    for index in range(8):
        bench.put(f"k{index}", torch.zeros(2 * PAGE))
        bench.stream.read(f"k{index}", 2 * PAGE, torch.float32, ahead=True)
    bench.stream.claim(["k7"])
    assert bench.stream.make_room([2 * PAGE_BYTES]) == ["k6"]
    assert bench.stream.make_room([1] * 3) == ["k5"]
    assert bench.stream.make_room([BUDGET_BYTES]) == []  # has no slot anyway
    assert bench.stream.make_room([BUDGET_BYTES // 4] * 9) == ["k4", "k3", "k2", "k1", "k0"]
    assert bench.stream.staged_keys() == ("k7",)


def test_letting_go_of_a_read_that_fails_is_no_error(bench: Bench) -> None:
    bench.put("a", torch.zeros(PAGE))
    bench.store.failing.add(("read", "a"))
    bench.stream.read("a", PAGE, torch.float32, ahead=True)
    assert bench.stream.make_room([BUDGET_BYTES // 4] * 4) == ["a"]
    assert bench.pool.free_bytes == bench.pool.held_bytes


def test_what_is_needed_is_waited_for_alone(bench: Bench) -> None:
    for key in "ab":
        bench.put(key, torch.zeros(PAGE))
        bench.stream.read(key, PAGE, torch.float32, ahead=True)
    assert bench.stream.wait_reads(["b"]) == ["b"]
    assert [ticket.finished for ticket in bench.store.tickets] == [False, True]


class MeanPool(BudgetSlots):
    """Has room or not as chance wills, as fragments and the pace of copies do."""

    def __init__(self, seed: int) -> None:
        super().__init__(memory=FakeMemory(), budget_bytes=BUDGET_BYTES)
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
    contents = {f"k{i}": torch.full((numel,), float(i)) for i, numel in enumerate(numels)}
    for bench in benches:
        for key, content in contents.items():
            bench.put(key, content)
    for stamp, (kind, numbers) in enumerate(calls):
        seen = [call(bench, kind, numbers, numels, float(stamp)) for bench in benches]
        assert seen[0] == seen[1]
        assert benches[0].stream.staged_keys() == benches[1].stream.staged_keys()
        assert benches[0].pool.held_bytes <= BUDGET_BYTES
        if kind == "update":
            for number in numbers:
                contents[f"k{number}"] = torch.full((numels[number],), float(stamp))
    for bench in benches:
        bench.stream.wait_reads()
        for key in bench.stream.staged_keys():
            assert torch.equal(bench.stream.staged_tensor(key), contents[key])


def call(bench: Bench, kind: str, numbers: list[int], numels: list[int], stamp: float) -> list[str]:
    stream = bench.stream
    sizes = {f"k{number}": 4 * numels[number] for number in numbers}
    absent = [(key, nbytes) for key, nbytes in sizes.items() if not stream.is_staged(key)]
    gone: list[str] = []
    if kind == "ahead":
        for key in list(stream.admit_prefetch(absent)):
            stream.read(key, sizes[key] // 4, torch.float32, ahead=True)
    elif kind == "need":
        stream.claim(sizes)
        gone = stream.make_room(nbytes for _, nbytes in absent)
        for key, nbytes in absent:
            stream.read(key, nbytes // 4, torch.float32)
        stream.wait_reads(list(sizes))
    else:
        for key in sizes:
            stream.drop(key)
        if kind == "update":
            for key, nbytes in sizes.items():
                stream.write_cast(key, torch.full((nbytes // 4,), stamp), torch.float32)
    return gone
