"""Shards that are read where the store has them: no slot, no copy, and never an old value."""

from __future__ import annotations

import threading

import pytest
import torch

from memascend.base.units import PAGE_BYTES
from memascend.nvme.resident import ResidentStore
from memascend.streaming.background import BackgroundStep
from memascend.streaming.parameters.shard import Shard, ShardState
from tests.support.parameter_bench import LARGEST, PAGE, Bench
from tests.support.streaming_fakes import FakeEvent, LateDevice
from tests.support.streaming_hosts import HostTensors, memory_store

PAGES = 64


def resident(pages: int = PAGES) -> ResidentStore:
    store = ResidentStore(memory_store(), stream_of=lambda key: "parameters")
    store.grant({"parameters": pages * PAGE_BYTES}, memory=HostTensors(), component="resident")
    return store


@pytest.fixture
def bench() -> Bench:
    return Bench(lender=resident())


def value(bench: Bench, shard: Shard) -> torch.Tensor:
    target = torch.empty(shard.numel, dtype=shard.dtype)
    bench.store.read(key=shard.key, target=target).wait()
    return target


def memory_of(bench: Bench, shard: Shard) -> int:
    """Where the store has it."""
    address = bench.store.lend(key=shard.key, dtype=shard.dtype).data_ptr()
    bench.store.take_back(key=shard.key)
    return int(address)


@pytest.mark.parametrize("numel", [3, PAGE, LARGEST, LARGEST + 1, 10 * LARGEST])
def test_a_resident_shard_is_read_where_it_is(bench: Bench, numel: int) -> None:
    shard, content = bench.new("a", numel)
    address = memory_of(bench, shard)
    for _ in range(2):
        tensor = bench.fetch(shard)
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, content)
        bench.stream.drop(shard)
        assert shard.state is ShardState.ABSENT
    assert bench.memory.taken == []
    assert bench.store.stats()["bytes_read"] == 0


def test_what_is_in_memory_in_part_is_read_as_before() -> None:
    bench = Bench(lender=resident(pages=5))
    first, first_content = bench.new("a", 4 * PAGE)
    part, part_content = bench.new("b", 2 * PAGE)
    assert torch.equal(bench.fetch(part), part_content)
    assert part.lease is not None
    assert torch.equal(bench.fetch(first), first_content)
    assert first.lease is None
    assert bench.pool.held_bytes > 0


def test_how_much_is_read_ahead_does_not_depend_on_what_is_resident() -> None:
    """Ranks have different parts in memory, and must decide alike."""
    staged = []
    for pages in (0, 5, PAGES):
        bench = Bench(lender=resident(pages))
        shards = [bench.new(f"k{index:02}", PAGE)[0] for index in range(20)]
        bench.stream.read_ahead(shards)
        staged.append([shard.is_staged for shard in shards])
        bench.stream.read_now([bench.new(f"n{index}", LARGEST)[0] for index in range(3)])
        staged[-1] += [shard.is_staged for shard in shards]
    assert staged[0] == staged[1] == staged[2]
    assert sum(staged[0]) < 40


# -- writes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cast", "from", "stage", "all"])
def test_a_write_waits_for_copies_out_of_the_memory(bench: Bench, how: str) -> None:
    shard, content = bench.new("a")
    copies = [FakeEvent(), FakeEvent()]
    for copy in copies:
        bench.fetch(shard)
        bench.stream.drop(shard, copy)
    bench.fetch(shard)  # and once more, without a copy
    bench.stream.drop(shard)
    assert not copies[1].passed
    if how == "cast":
        bench.stream.write_cast(shard, content * 2)
    elif how == "from":
        bench.stream.write_from(shard, content * 2)
    elif how == "stage":
        slot = bench.stream.stage(shard)
        assert slot is not None
        slot.copy_(content * 2)
        bench.stream.write(shard)
    else:
        bench.stream.forget_all()
        # As the optimizer does, past the stream.
        bench.store.write(key="a", source=content * 2, offset_bytes=0).wait()
    assert copies[1].passed
    assert torch.equal(value(bench, shard), content * 2)
    assert torch.equal(bench.fetch(shard), content * 2)


def test_a_shard_in_use_is_not_written_by_others(bench: Bench) -> None:
    shard, content = bench.new("a")
    tensor = bench.fetch(shard)
    with pytest.raises(ValueError, match="lent"):
        bench.store.write(key="a", source=content * 2, offset_bytes=0)
    bench.stream.drop(shard, FakeEvent())
    with pytest.raises(ValueError, match="lent"):
        bench.store.discard(key="a")
    assert torch.equal(tensor, content)


def test_what_is_to_be_filled_is_a_slot(bench: Bench) -> None:
    shard, content = bench.new("a")
    bench.fetch(shard)
    slot = bench.stream.stage(shard)
    assert slot is not None
    assert shard.lease is not None
    slot.fill_(-1.0)
    assert torch.equal(value(bench, shard), content)
    bench.stream.write(shard)
    assert torch.equal(value(bench, shard), torch.full_like(content, -1.0))


def test_chunks_that_are_on_their_way_are_waited_for() -> None:
    device = LateDevice()
    bench = Bench(lender=resident(), device=device)
    with device:
        shard, content = bench.new("a", 3 * LARGEST)
        bench.stream.write_cast(shard, device.tensor(content * 2))
        assert torch.equal(bench.fetch(shard), content * 2)


# -- the walk --------------------------------------------------------------------------------------


def test_a_shard_is_not_lent_before_its_new_value_is_there() -> None:
    walk, may_go = BackgroundStep(), threading.Event()
    bench = Bench(lender=resident(), background=walk)
    shard, content = bench.new("a")

    def step(reach: object) -> None:
        assert may_go.wait(30)
        # Refused if it were lent.
        bench.store.write(key="a", source=content * 2, offset_bytes=0).wait()

    walk.start([step], {"a": (0, PAGE)}, lambda: None)
    bench.stream.read_ahead([shard])
    assert shard.state is ShardState.READING
    assert shard.tensor is None
    assert not bench.stream.has_arrived(shard)
    may_go.set()
    walk.wait_for(["a"])
    assert bench.stream.has_arrived(shard)
    assert torch.equal(bench.fetch(shard), content * 2)
    walk.finish()
    walk.close()


# -- letting go ------------------------------------------------------------------------------------


def test_after_ctrl_c_nothing_is_lent(bench: Bench) -> None:
    used, copied, ahead, half = (bench.new(key)[0] for key in ("used", "copied", "ahead", "half"))
    bench.fetch(used)
    bench.fetch(copied)
    copy = FakeEvent()
    bench.stream.drop(copied, copy)
    bench.stream.read_ahead([ahead])
    bench.store.lend(key="half", dtype=half.dtype)  # and then nothing was noted
    bench.stream.recover()
    assert copy.passed
    for shard in (used, copied, ahead, half):
        bench.store.write(key=shard.key, source=torch.ones(PAGE)).wait()
        assert bench.fetch(shard).tolist() == [1.0] * PAGE


def test_what_cannot_be_lent_any_more_is_read(bench: Bench) -> None:
    """The cache may be given back between the request and the use."""
    shard, content = bench.new("a")
    bench.stream.read_ahead([shard])
    bench.store.revoke()
    assert torch.equal(bench.fetch(shard), content)
