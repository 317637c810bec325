"""Shards without a slot: which of them are begun ahead of their use, and never an old value."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from memascend.errors import StoreError
from memascend.memory.pool import Pool
from memascend.nvme.resident import ResidentStore
from memascend.streaming.background import BackgroundStep
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.parameter_bench import LARGEST, PAGE, Bench
from tests.support.streaming_fakes import FakeMemory, FakeStore, LateDevice
from tests.support.streaming_hosts import HostTensors, memory_store

NUMEL = 6 * PAGE  # no slot is so large; a staging slot has a page, and one of the three is used


@pytest.fixture
def bench() -> Bench:
    return Bench()


def reads(bench: Bench, key: str) -> int:
    return bench.store.log().count(("read", key))


def begun(bench: Bench, numel: int = NUMEL) -> tuple[Shard, torch.Tensor]:
    """A shard whose first chunk is on its way."""
    shard, content = bench.new("head", numel)
    bench.stream.prefetch([shard])
    assert reads(bench, "head") == 1
    return shard, content


# -- which ---------------------------------------------------------------------------------------


def test_the_first_shard_without_a_slot_is_begun_and_nobody_sees_it(bench: Bench) -> None:
    """Its state decides what DeepSpeed gathers ahead: all ranks alike, whatever was begun."""
    numels = {"layer": PAGE, "head": NUMEL, "embedding": NUMEL, "last": PAGE}
    shards = {key: bench.new(key, numel) for key, numel in numels.items()}
    bench.stream.prefetch(shard for shard, _ in shards.values())
    assert [reads(bench, key) for key in numels] == [1, 1, 0, 1]
    head, content = shards["head"]
    assert head.state is ShardState.ABSENT
    assert head not in bench.stream.take_changes()
    assert not bench.stream.has_arrived(head)
    assert torch.equal(bench.fetch(head), content)
    assert reads(bench, "head") == NUMEL // PAGE


def test_none_overtakes_what_is_needed_sooner_and_finds_no_room(bench: Bench) -> None:
    layers = [bench.new(f"layer{index}", LARGEST)[0] for index in range(3)]
    head, _ = bench.new("head", NUMEL)
    bench.stream.prefetch([*layers, head])
    assert [shard.is_staged for shard in layers] == [True, True, False]
    assert reads(bench, "head") == 0


def test_none_is_begun_where_nothing_is_to_be_read_ahead() -> None:
    bench = Bench(prefetch_bytes=0)
    bench.stream.prefetch([bench.new("head", NUMEL)[0]])
    assert bench.store.tickets == []


def test_none_is_begun_that_needs_no_read() -> None:
    store = ResidentStore(memory_store(), stream_of=lambda key: "parameters")
    store.grant({"parameters": 1 << 20}, memory=HostTensors(), component="resident")
    bench = Bench(lender=store)
    shard, content = bench.new("head", NUMEL)
    bench.stream.prefetch([shard])
    assert not store.lends(key="head", dtype=torch.int8) or bench.fetch(shard).equal(content)
    assert shard.is_lent


def test_one_that_cannot_be_read_is_an_error_of_who_needs_it(bench: Bench) -> None:
    shard, content = bench.new("head", NUMEL)
    stored = bench.store.content.pop("head")
    bench.stream.prefetch([shard])
    with pytest.raises(StoreError, match="no key"):
        bench.fetch(shard)
    bench.store.content["head"] = stored
    assert torch.equal(bench.fetch(shard), content)


def test_without_staging_slots_there_is_nothing_in_chunks() -> None:
    stream = ParameterStream(store=FakeStore(), pool=Pool(memory=FakeMemory(), component="p"))
    shard = stream.shard("a", PAGE, torch.float32)
    stream._chunks.prefetch(shard)
    stream._chunks.drop()
    stream.wait_writes()
    with pytest.raises(AssertionError, match="only a budget"):
        stream._chunks.read(shard)


# -- never an old value --------------------------------------------------------------------------


def stored_behind_the_back(bench: Bench, shard: Shard, content: torch.Tensor) -> None:
    bench.stream.drop_all()
    bench.store.write(key=shard.key, source=content)


@pytest.mark.parametrize(
    "store",
    [
        lambda bench, shard, content: bench.stream.write_cast(shard, content),
        lambda bench, shard, content: bench.stream.write_from(shard, content),
        stored_behind_the_back,
    ],
    ids=["a step", "a modified parameter", "a load"],
)
def test_what_is_stored_meanwhile_is_read(
    bench: Bench, store: Callable[[Bench, Shard, torch.Tensor], None]
) -> None:
    shard, content = begun(bench)
    store(bench, shard, content + 1)
    assert torch.equal(bench.fetch(shard), content + 1)


def test_one_is_not_begun_while_its_new_value_is_on_its_way() -> None:
    with LateDevice() as device:
        bench = Bench(device=device)
        shard, content = bench.new("head", NUMEL)
        bench.stream.write_cast(shard, device.tensor(content + 1))
        bench.stream.prefetch([shard])
        assert reads(bench, "head") == 0
        bench.stream.wait_writes()
        bench.stream.prefetch([shard])
        assert reads(bench, "head") == 1
        assert torch.equal(bench.fetch(shard), content + 1)


def test_one_is_begun_when_the_walk_has_passed_it() -> None:
    walk, may_go = BackgroundStep(), threading.Event()
    bench = Bench(background=walk)
    shard, content = bench.new("head", NUMEL)

    def step(reach: object) -> None:
        assert may_go.wait(30)
        bench.store.write(key="head", source=content + 1).wait()

    walk.start([step], {"head": (0, NUMEL)}, lambda: None)
    bench.stream.prefetch([shard])
    assert reads(bench, "head") == 0
    may_go.set()
    walk.finish()
    bench.stream.prefetch([shard])
    assert reads(bench, "head") == 1
    assert torch.equal(bench.fetch(shard), content + 1)
    walk.close()


def test_what_ctrl_c_has_left_is_forgotten(bench: Bench) -> None:
    shard, content = begun(bench)
    bench.stream.recover()
    bench.store.write(key="head", source=content + 1)
    assert torch.equal(bench.fetch(shard), content + 1)
