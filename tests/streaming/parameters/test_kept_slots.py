"""Slots of shards that were let go: kept while there is room, and never stale."""

from __future__ import annotations

import pytest
import torch

from memascend.errors import StoreError
from memascend.streaming.parameters.shard import Shard, ShardState
from tests.support.parameter_bench import BUDGET_BYTES, LARGEST, PAGE, Bench
from tests.support.streaming_fakes import FakeEvent


@pytest.fixture
def bench() -> Bench:
    return Bench()


def use(bench: Bench, shard: Shard, content: torch.Tensor, event: FakeEvent | None = None) -> None:
    """What a layer does with a shard."""
    assert torch.equal(bench.fetch(shard), content)
    bench.stream.drop(shard, event)


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
    bench.stream.read_ahead([shard])
    bench.stream.drop(shard)
    bench.stream.read_ahead([shard])
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
    bench.stream.drop(other)  # never stored
    use(bench, other, other_content)


def test_what_others_are_about_to_change_is_forgotten(bench: Bench) -> None:
    contents = put_all(bench, 3, PAGE)
    for shard, content in contents.items():
        use(bench, shard, content)
    bench.stream.read_ahead([list(contents)[1]])
    bench.stream.forget_all()
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
    bench.stream.forget_all()
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
