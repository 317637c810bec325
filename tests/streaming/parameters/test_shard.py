"""Records of shards: where they are, and what may follow."""

from __future__ import annotations

import pytest
import torch

from memascend.base.waiting import Ended
from memascend.streaming.parameters.shard import Shard, ShardState


def make(numel: int) -> Shard:
    return Shard(f"k{numel}", numel, torch.bfloat16)


def test_on_its_way_or_there_it_is_staged_and_when_it_leaves_nothing_is_left_of_it() -> None:
    shard = make(8)
    others = {ShardState.ABSENT, ShardState.KEPT}
    for state in ShardState:
        shard.state = state
        assert shard.is_staged == (state not in others)
        shard.tensor, shard.read = torch.zeros(8), Ended()
        shard.reset()
        assert shard.state is ShardState.ABSENT
        assert (shard.tensor, shard.read) == (None, None)


@pytest.mark.parametrize(
    "states",
    [
        "DELAYED READING ARRIVED KEPT RECALLED KEPT RECALLED ARRIVED CHANGED",
        "DEFERRED LENT",
        "DEFERRED ARRIVED CHANGED",
        "CHANGED",
    ],
)
def test_a_state_is_followed_by_those_that_are_written_down(states: str) -> None:
    shard = make(8)
    for name in states.split():
        shard.become(ShardState[name])
    assert shard.is_staged
    assert not shard.is_coming


@pytest.mark.parametrize("state", ShardState)
def test_no_state_is_followed_by_itself_nor_by_absent_but_when_the_shard_leaves(
    state: ShardState,
) -> None:
    shard = make(8)
    shard.state = state
    for following in (state, ShardState.ABSENT):
        with pytest.raises(AssertionError, match=f"is {state.name} and cannot become"):
            shard.become(following)


def test_changed_contents_are_never_kept_or_taken_for_those_of_the_store() -> None:
    shard = make(8)
    shard.become(ShardState.CHANGED)
    for following in ShardState:
        with pytest.raises(AssertionError, match="cannot become"):
            shard.become(following)
