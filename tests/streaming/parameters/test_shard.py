"""Records of shards: their sizes, and where they are."""

from __future__ import annotations

import torch

from memascend.base.sizes import PREFETCH_BYTES_MIN, REPEATED_COUNT_MIN
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
    staged = []
    for shard.state in ShardState:
        if shard.is_staged:
            staged.append(shard.state)
    assert staged == [ShardState.READING, ShardState.STAGED]
    shard.tensor, shard.is_ahead, shard.equals_store = torch.zeros(8), True, True
    shard.leave()
    assert shard.state is ShardState.ABSENT
    assert (shard.tensor, shard.is_ahead, shard.equals_store) == (None, False, False)
