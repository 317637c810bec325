"""Records of shards: their sizes, and where they are."""

from __future__ import annotations

import pytest
import torch

from memascend.base.sizes import PREFETCH_BYTES_MIN, REPEATED_COUNT_MIN
from memascend.base.waiting import Ended
from memascend.streaming.parameters.shard import Shard, Shards, ShardState


def make(shards: Shards, *numels: int) -> list[Shard]:
    return [shards.make(f"k{numel}", numel, torch.bfloat16, None) for numel in numels]


def test_what_occurs_often_counts_and_the_embedding_does_not() -> None:
    shards = Shards()
    assert shards.repeated_bytes_max == 0
    made = make(shards, 1000, *[10] * REPEATED_COUNT_MIN, *[20] * REPEATED_COUNT_MIN)
    assert shards.repeated_bytes_max == 40
    assert shards.made == made


def test_twice_the_largest_of_those_may_be_read_ahead_unless_it_is_stated() -> None:
    shards = Shards()
    assert shards.prefetch_bytes(None) == PREFETCH_BYTES_MIN
    make(shards, *[PREFETCH_BYTES_MIN] * REPEATED_COUNT_MIN)  # twice as many bytes
    assert shards.prefetch_bytes(None) == 4 * PREFETCH_BYTES_MIN
    assert shards.prefetch_bytes(0) == 0


def test_one_that_is_stored_in_another_dtype_counts_with_its_new_size() -> None:
    shards = Shards()
    made = make(shards, *[10] * REPEATED_COUNT_MIN)
    for shard in made:
        shards.recast(shard, torch.float32)
    assert made[0].nbytes == 40
    assert shards.repeated_bytes_max == 40


def test_on_its_way_or_there_it_is_staged_and_when_it_leaves_nothing_is_left_of_it() -> None:
    (shard,) = make(Shards(), 8)
    others = {ShardState.ABSENT, ShardState.KEPT}
    for state in ShardState:
        shard.state = state
        assert shard.is_staged == (state not in others)
        shard.tensor, shard.read = torch.zeros(8), Ended()
        shard.leave()
        assert shard.state is ShardState.ABSENT
        assert (shard.tensor, shard.read) == (None, None)


@pytest.mark.parametrize(
    "states",
    [
        "LATE READING ARRIVED KEPT RECALLED KEPT RECALLED ARRIVED CHANGED",
        "DEFERRED LENT",
        "DEFERRED ARRIVED CHANGED",
        "CHANGED",
    ],
)
def test_a_state_is_followed_by_those_that_are_written_down(states: str) -> None:
    (shard,) = make(Shards(), 8)
    for name in states.split():
        shard.become(ShardState[name])
    assert shard.is_staged
    assert not shard.is_coming


@pytest.mark.parametrize("state", ShardState)
def test_no_state_is_followed_by_itself_nor_by_absent_but_when_the_shard_leaves(
    state: ShardState,
) -> None:
    (shard,) = make(Shards(), 8)
    shard.state = state
    for following in (state, ShardState.ABSENT):
        with pytest.raises(AssertionError, match=f"is {state.name} and cannot become"):
            shard.become(following)


def test_changed_contents_are_never_kept_or_taken_for_those_of_the_store() -> None:
    (shard,) = make(Shards(), 8)
    shard.become(ShardState.CHANGED)
    for following in ShardState:
        with pytest.raises(AssertionError, match="cannot become"):
            shard.become(following)
