"""Shards that wait for the walk get their new values from memory, and never another one's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from memascend.errors import StoreError
from memascend.streaming.background import BackgroundStep
from memascend.streaming.hand_over import HandOver
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.streaming_fakes import CountedPool, FakeStore

NUMEL = 1024  # of float32: one page
HALF = NUMEL // 2


class Behind:
    """A walk that makes one shard's value, half by half, when it may."""

    def __init__(self) -> None:
        self.store, self.pool, self.hand_over = FakeStore(), CountedPool(), HandOver()
        self.walk = BackgroundStep()
        self.stream = ParameterStream(
            store=self.store, pool=self.pool, background=self.walk, hand_over=self.hand_over
        )
        self.store.content["a"] = torch.ones(NUMEL).view(torch.uint8)
        self.shard = self.stream.shard("a", NUMEL, torch.float32)
        self.may_go = [threading.Event(), threading.Event()]
        self.is_half = threading.Event()
        self.fails = False

    def start(self) -> None:
        self.walk.start([self._step], {"a": (0, NUMEL)}, lambda: None)

    def _step(self, reach: Callable[[int], None]) -> None:
        for number, may_go in enumerate(self.may_go):
            assert may_go.wait(30)
            if self.fails:
                raise StoreError(5, "the drive is gone")
            begin, values = number * HALF, torch.full((HALF,), 2.0 + number)
            self.store.write(key="a", source=values, offset_bytes=4 * begin).wait()
            self.hand_over.fill("a", begin, values)
            self.is_half.set()
        reach(NUMEL)

    def go(self) -> None:
        for may_go in self.may_go:
            may_go.set()

    def fetch(self) -> torch.Tensor:
        self.stream.read_now([self.shard])
        assert self.shard.tensor is not None
        return self.shard.tensor

    @property
    def reads(self) -> list[int]:
        return [one._end - one._begin for one in self.store.tickets if one.kind == "read"]


@pytest.fixture
def behind() -> Iterator[Behind]:
    made = Behind()
    made.start()
    yield made
    made.go()
    made.walk.close()


def new_value() -> torch.Tensor:
    return torch.cat([torch.full((HALF,), 2.0), torch.full((HALF,), 3.0)])


def test_a_shard_that_waits_is_not_read(behind: Behind) -> None:
    behind.stream.prefetch([behind.shard])
    assert behind.shard.state is ShardState.DELAYED
    behind.go()
    assert torch.equal(behind.fetch(), new_value())
    assert behind.reads == []
    assert behind.stream.has_arrived(behind.shard)


def test_of_a_shard_that_comes_late_the_beginning_is_read(behind: Behind) -> None:
    behind.may_go[0].set()
    assert behind.is_half.wait(30)
    behind.stream.prefetch([behind.shard])
    behind.go()
    assert torch.equal(behind.fetch(), new_value())
    assert behind.reads == [4 * HALF]


def let_go(stream: ParameterStream, shard: Shard) -> None:
    stream.let_go(shard)


def drop_all(stream: ParameterStream, shard: Shard) -> None:
    stream.drop_all()


def recover(stream: ParameterStream, shard: Shard) -> None:
    stream.recover()


@pytest.mark.parametrize("end", [let_go, drop_all, recover])
def test_a_slot_that_was_given_back_belongs_to_its_next_shard(
    behind: Behind, end: Callable[..., None]
) -> None:
    behind.stream.prefetch([behind.shard])
    assert behind.shard.lease is not None
    address = behind.shard.lease.slot.data_ptr()
    end(behind.stream, behind.shard)
    other = behind.stream.shard("b", NUMEL, torch.float32)
    slot = behind.stream.stage(other)
    assert slot is not None
    assert slot.data_ptr() == address
    slot.fill_(7.0)
    behind.go()
    behind.walk.finish()
    assert torch.equal(slot, torch.full((NUMEL,), 7.0))
    assert torch.equal(behind.fetch(), new_value())


def test_a_value_that_a_script_stores_behind_the_walk_is_read(behind: Behind) -> None:
    behind.stream.prefetch([behind.shard])
    behind.go()
    behind.fetch().fill_(9.0)
    behind.stream.write(behind.shard)
    assert torch.equal(behind.fetch(), torch.full((NUMEL,), 9.0))


def test_half_a_value_of_a_walk_that_failed_is_never_given(behind: Behind) -> None:
    behind.stream.prefetch([behind.shard])
    behind.may_go[0].set()
    assert behind.is_half.wait(30)
    behind.fails = True
    behind.go()
    with pytest.raises(StoreError, match="gone"):
        behind.fetch()
    assert behind.shard.state is ShardState.ABSENT
    with pytest.raises(StoreError, match="gone"):
        behind.walk.finish()
    behind.store.content["a"] = torch.full((NUMEL,), 4.0).view(torch.uint8)  # a load
    assert torch.equal(behind.fetch(), torch.full((NUMEL,), 4.0))
