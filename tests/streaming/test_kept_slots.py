"""Slots of shards that were let go: kept while there is room, and never stale."""

from __future__ import annotations

import pytest
import torch

from memascend.errors import StoreError
from tests.streaming.test_parameters_budget import BUDGET_BYTES, LARGEST, PAGE, Bench
from tests.support.streaming_fakes import FakeEvent


@pytest.fixture
def bench() -> Bench:
    return Bench()


def use(bench: Bench, key: str, content: torch.Tensor, event: FakeEvent | None = None) -> None:
    """What a layer does with a shard."""
    assert torch.equal(bench.fetch(key, content), content)
    bench.stream.drop(key, event)


def put_all(bench: Bench, count: int, numel: int) -> dict[str, torch.Tensor]:
    return {f"k{i}": bench.put(f"k{i}", torch.randn(numel)) for i in range(count)}


def test_a_shard_that_was_let_go_is_not_read_again(bench: Bench) -> None:
    content = bench.put("a", torch.randn(PAGE))
    use(bench, "a", content)
    bench.store.content["a"].zero_()  # nobody looks
    use(bench, "a", content)
    assert bench.store.log() == [("read", "a")]


def test_what_was_used_last_is_still_there_for_the_way_back(bench: Bench) -> None:
    contents = put_all(bench, 10, LARGEST)
    for key in (*contents, *reversed(contents)):
        use(bench, key, contents[key])
    # Four of the largest fit: the turning point and the three before it.
    assert len(bench.store.log()) == 20 - 4
    assert bench.pool.held_bytes <= BUDGET_BYTES


def test_what_is_kept_takes_no_room_from_anything(bench: Bench) -> None:
    contents = put_all(bench, 16, PAGE)
    for key, content in contents.items():
        use(bench, key, content)
    large = {f"large{i}": bench.put(f"large{i}", torch.randn(LARGEST)) for i in range(4)}
    for key, content in large.items():
        bench.fetch(key, content)
    assert all(bench.stream.is_in_slot(key) for key in large)


@pytest.mark.parametrize("numel", [PAGE, LARGEST + PAGE])
def test_a_shard_that_changed_is_read_again(bench: Bench, numel: int) -> None:
    content = bench.put("a", torch.randn(numel))
    use(bench, "a", content)
    bench.stream.write_from("a", content * 2)
    use(bench, "a", content * 2)
    bench.stream.write_cast("a", content * 3, torch.float32)
    use(bench, "a", content * 3)
    bench.stream.wait_writes()
    use(bench, "a", content * 3)


def test_a_shard_that_was_written_from_its_slot_is_read_again(bench: Bench) -> None:
    content = bench.put("a", torch.randn(PAGE))
    bench.fetch("a", content).mul_(2)
    bench.stream.write("a")
    bench.store.content["a"] = (content * 3).view(torch.uint8)
    use(bench, "a", content * 3)
    slot = bench.stream.stage("b", PAGE, torch.float32)
    assert slot is not None
    slot.fill_(1.0)
    bench.stream.drop("b")  # never stored
    use(bench, "b", bench.put("b", content))


def test_what_others_are_about_to_change_is_forgotten(bench: Bench) -> None:
    contents = put_all(bench, 3, PAGE)
    for key, content in contents.items():
        use(bench, key, content)
    bench.stream.read("k1", PAGE, torch.float32, ahead=True)
    bench.stream.forget_all()
    assert bench.pool.free_bytes == bench.pool.held_bytes
    for key, content in contents.items():
        bench.store.content[key] = (content * 2).view(torch.uint8)
        use(bench, key, content * 2)


def test_a_read_that_failed_leaves_nothing_behind(bench: Bench) -> None:
    content = bench.put("a", torch.randn(PAGE))
    bench.store.failing.add(("read", "a"))
    with pytest.raises(StoreError):
        bench.fetch("a", content)
    bench.store.failing.clear()
    use(bench, "a", content)


def test_a_slot_waits_for_every_copy_out_of_it(bench: Bench) -> None:
    """Used twice, the second time without a copy: the first copy still has to pass."""
    content = bench.put("a", torch.randn(LARGEST))
    copy = FakeEvent()
    use(bench, "a", content, copy)
    use(bench, "a", content)
    others = put_all(bench, 4, LARGEST)
    for index, (key, other) in enumerate(others.items()):
        assert copy.passed is False, index
        bench.stream.read(key, other.numel(), other.dtype)
        if index < 3:
            bench.stream.wait_reads([key])
    assert copy.wait_count == 1


def test_forgetting_waits_for_copies(bench: Bench) -> None:
    content = bench.put("a", torch.randn(PAGE))
    copy = FakeEvent()
    use(bench, "a", content, copy)
    bench.stream.forget_all()
    assert copy.passed
    assert bench.pool.free_bytes == bench.pool.held_bytes


def test_one_slot_that_is_copied_from_costs_no_other_its_contents(bench: Bench) -> None:
    contents = put_all(bench, 4, LARGEST)
    copies = {key: FakeEvent() for key in contents}
    for key, content in contents.items():
        use(bench, key, content, copies[key])
    use(bench, "other", bench.put("other", torch.randn(LARGEST)))
    assert [event.wait_count for event in copies.values()] == [1, 0, 0, 0]
    before = len(bench.store.log())
    for key in ("k1", "k2", "k3"):
        use(bench, key, contents[key])
    assert len(bench.store.log()) == before
