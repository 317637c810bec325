"""Memory of shards that were let go: kept while there is room, lent by the store, never stale."""

from __future__ import annotations

import threading

import pytest
import torch

from memascend.base.units import PAGE_BYTES
from memascend.errors import StoreError
from memascend.nvme.resident import ResidentStore
from memascend.streaming.background import BackgroundStep
from memascend.streaming.parameters.shard import Shard, ShardState
from tests.support.parameter_bench import BUDGET_BYTES, LARGEST, PAGE, Bench
from tests.support.streaming_fakes import FakeEvent, LateDevice
from tests.support.streaming_hosts import HostTensors, memory_store

PAGES = 64


@pytest.fixture
def bench() -> Bench:
    return Bench()


def use(bench: Bench, shard: Shard, content: torch.Tensor, event: FakeEvent | None = None) -> None:
    """What a layer does with a shard."""
    assert torch.equal(bench.fetch(shard), content)
    bench.stream.let_go(shard, event)


def put_all(bench: Bench, count: int, numel: int) -> dict[Shard, torch.Tensor]:
    return dict(bench.new(f"k{i}", numel) for i in range(count))


def test_a_shard_that_was_let_go_is_not_read_again(bench: Bench) -> None:
    shard, content = bench.new("a")
    use(bench, shard, content)
    assert shard.state is ShardState.KEPT
    bench.store.content["a"].zero_()  # nobody looks
    use(bench, shard, content)
    assert bench.store.log() == [("read", "a")]


def test_a_kept_shard_that_is_read_ahead_is_there_without_a_read(bench: Bench) -> None:
    shard, content = bench.new("a")
    use(bench, shard, content)
    bench.stream.prefetch([shard])
    bench.stream.let_go(shard)
    bench.stream.prefetch([shard])
    bench.stream.wait_reads()
    assert shard.tensor is not None
    assert torch.equal(shard.tensor, content)
    assert bench.store.log() == [("read", "a")]


def test_what_was_used_last_is_still_there_for_the_way_back(bench: Bench) -> None:
    contents = put_all(bench, 10, LARGEST)
    for shard in (*contents, *reversed(contents)):
        use(bench, shard, contents[shard])
    # Four of the largest fit: the turning point and the three before it.
    assert len(bench.store.log()) == 20 - 4
    assert bench.pool.held_bytes <= BUDGET_BYTES


def test_what_is_kept_takes_no_room_from_anything(bench: Bench) -> None:
    for shard, content in put_all(bench, 16, PAGE).items():
        use(bench, shard, content)
    large = [bench.new(f"large{i}", LARGEST)[0] for i in range(4)]
    for shard in large:
        bench.fetch(shard)
    assert all(shard.lease is not None for shard in large)


@pytest.mark.parametrize("numel", [PAGE, LARGEST + PAGE])
def test_a_shard_that_changed_is_read_again(bench: Bench, numel: int) -> None:
    shard, content = bench.new("a", numel)
    use(bench, shard, content)
    bench.stream.write_from(shard, content * 2)
    use(bench, shard, content * 2)
    bench.stream.write_cast(shard, content * 3)
    use(bench, shard, content * 3)
    bench.stream.wait_writes()
    use(bench, shard, content * 3)


def test_a_shard_that_was_written_from_its_slot_is_read_again(bench: Bench) -> None:
    shard, content = bench.new("a")
    bench.fetch(shard).mul_(2)
    bench.stream.write(shard)
    bench.store.content["a"] = (content * 3).view(torch.uint8)
    use(bench, shard, content * 3)
    other, other_content = bench.new("b")
    slot = bench.stream.stage(other)
    assert slot is not None
    slot.fill_(1.0)
    bench.stream.let_go(other)  # never stored
    use(bench, other, other_content)


def test_what_others_are_about_to_change_is_forgotten(bench: Bench) -> None:
    contents = put_all(bench, 3, PAGE)
    for shard, content in contents.items():
        use(bench, shard, content)
    bench.stream.prefetch([list(contents)[1]])
    bench.stream.drop_all()
    assert bench.pool.free_bytes == bench.pool.held_bytes
    for shard, content in contents.items():
        bench.store.content[shard.key] = (content * 2).view(torch.uint8)
        use(bench, shard, content * 2)


def test_a_read_that_failed_leaves_nothing_behind(bench: Bench) -> None:
    shard, content = bench.new("a")
    bench.store.failing.add(("read", "a"))
    with pytest.raises(StoreError):
        bench.fetch(shard)
    bench.store.failing.clear()
    use(bench, shard, content)


def test_a_slot_waits_for_every_copy_out_of_it(bench: Bench) -> None:
    """Used twice, the second time without a copy: the first copy still has to pass."""
    shard, content = bench.new("a", LARGEST)
    copy = FakeEvent()
    use(bench, shard, content, copy)
    use(bench, shard, content)
    for index, other in enumerate(put_all(bench, 4, LARGEST)):
        assert copy.passed is False, index
        bench.stream.read_now([other])
    assert copy.wait_count == 1


def test_forgetting_waits_for_copies(bench: Bench) -> None:
    shard, content = bench.new("a")
    copy = FakeEvent()
    use(bench, shard, content, copy)
    bench.stream.drop_all()
    assert copy.passed
    assert bench.pool.free_bytes == bench.pool.held_bytes


def test_one_slot_that_is_copied_from_costs_no_other_its_contents(bench: Bench) -> None:
    contents = put_all(bench, 4, LARGEST)
    copies = {shard: FakeEvent() for shard in contents}
    for shard, content in contents.items():
        use(bench, shard, content, copies[shard])
    use(bench, *bench.new("other", LARGEST))
    assert [event.wait_count for event in copies.values()] == [1, 0, 0, 0]
    before = len(bench.store.log())
    for shard in list(contents)[1:]:
        use(bench, shard, contents[shard])
    assert len(bench.store.log()) == before


# -- loans -----------------------------------------------------------------------------------------


def resident(pages: int = PAGES) -> ResidentStore:
    store = ResidentStore(memory_store(), stream_of=lambda key: "parameters")
    store.grant({"parameters": pages * PAGE_BYTES}, memory=HostTensors(), component="resident")
    return store


@pytest.fixture
def lending() -> Bench:
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
def test_a_resident_shard_is_read_where_it_is(lending: Bench, numel: int) -> None:
    shard, content = lending.new("a", numel)
    address = memory_of(lending, shard)
    for _ in range(2):
        tensor = lending.fetch(shard)
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, content)
        lending.stream.let_go(shard)
        assert shard.state is ShardState.ABSENT
    assert lending.memory.taken == []
    assert lending.store.stats()["bytes_read"] == 0


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
        bench.stream.prefetch(shards)
        staged.append([shard.is_staged for shard in shards])
        bench.stream.read_now([bench.new(f"n{index}", LARGEST)[0] for index in range(3)])
        staged[-1] += [shard.is_staged for shard in shards]
    assert staged[0] == staged[1] == staged[2]
    assert sum(staged[0]) < 40


# -- writes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cast", "from", "stage", "all"])
def test_a_write_waits_for_copies_out_of_the_memory(lending: Bench, how: str) -> None:
    shard, content = lending.new("a")
    copies = [FakeEvent(), FakeEvent()]
    for copy in copies:
        lending.fetch(shard)
        lending.stream.let_go(shard, copy)
    lending.fetch(shard)  # and once more, without a copy
    lending.stream.let_go(shard)
    assert not copies[1].passed
    if how == "cast":
        lending.stream.write_cast(shard, content * 2)
    elif how == "from":
        lending.stream.write_from(shard, content * 2)
    elif how == "stage":
        slot = lending.stream.stage(shard)
        assert slot is not None
        slot.copy_(content * 2)
        lending.stream.write(shard)
    else:
        lending.stream.drop_all()
        # As the optimizer does, past the stream.
        lending.store.write(key="a", source=content * 2, offset_bytes=0).wait()
    assert copies[1].passed
    assert torch.equal(value(lending, shard), content * 2)
    assert torch.equal(lending.fetch(shard), content * 2)


def test_a_shard_in_use_is_not_written_by_others(lending: Bench) -> None:
    shard, content = lending.new("a")
    tensor = lending.fetch(shard)
    with pytest.raises(ValueError, match="lent"):
        lending.store.write(key="a", source=content * 2, offset_bytes=0)
    lending.stream.let_go(shard, FakeEvent())
    with pytest.raises(ValueError, match="lent"):
        lending.store.discard(key="a")
    assert torch.equal(tensor, content)


def test_what_is_to_be_filled_is_a_slot(lending: Bench) -> None:
    shard, content = lending.new("a")
    lending.fetch(shard)
    slot = lending.stream.stage(shard)
    assert slot is not None
    assert shard.lease is not None
    slot.fill_(-1.0)
    assert torch.equal(value(lending, shard), content)
    lending.stream.write(shard)
    assert torch.equal(value(lending, shard), torch.full_like(content, -1.0))


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
    bench.stream.prefetch([shard])
    assert shard.state is ShardState.DEFERRED
    assert shard.tensor is None
    assert not bench.stream.has_arrived(shard)
    may_go.set()
    walk.wait_for(["a"])
    assert bench.stream.has_arrived(shard)
    assert torch.equal(bench.fetch(shard), content * 2)
    walk.finish()
    walk.close()


# -- letting go ------------------------------------------------------------------------------------


def test_after_ctrl_c_nothing_is_lent(lending: Bench) -> None:
    used, copied, ahead, half = (lending.new(key)[0] for key in ("used", "copied", "ahead", "half"))
    lending.fetch(used)
    lending.fetch(copied)
    copy = FakeEvent()
    lending.stream.let_go(copied, copy)
    lending.stream.prefetch([ahead])
    lending.store.lend(key="half", dtype=half.dtype)  # and then nothing was noted
    lending.stream.recover()
    assert copy.passed
    for shard in (used, copied, ahead, half):
        lending.store.write(key=shard.key, source=torch.ones(PAGE)).wait()
        assert lending.fetch(shard).tolist() == [1.0] * PAGE


def test_what_cannot_be_lent_any_more_is_read(lending: Bench) -> None:
    """The cache may be given back between the request and the use."""
    shard, content = lending.new("a")
    lending.stream.prefetch([shard])
    lending.store.revoke()
    assert torch.equal(lending.fetch(shard), content)
