"""How many bytes of shards may be read ahead of their use."""

from __future__ import annotations

from memascend.base.sizes import PREFETCH_BYTES_MIN, REPEATED_COUNT_MIN
from memascend.streaming.parameters.prefetch import PrefetchLimit


def limit_of(*sizes: int, given_bytes: int | None = None, drive_count: int = 1) -> PrefetchLimit:
    limit = PrefetchLimit(given_bytes, drive_count)
    for nbytes in sizes:
        limit.note_made(nbytes)
    return limit


def test_what_occurs_often_counts_and_the_embedding_does_not() -> None:
    assert limit_of().repeated_bytes_max == 0
    limit = limit_of(2000, *[20] * REPEATED_COUNT_MIN, *[40] * REPEATED_COUNT_MIN)
    assert limit.repeated_bytes_max == 40


def test_twice_the_largest_of_those_may_be_read_ahead_unless_it_is_stated() -> None:
    assert limit_of().nbytes == PREFETCH_BYTES_MIN
    sizes = [2 * PREFETCH_BYTES_MIN] * REPEATED_COUNT_MIN
    assert limit_of(*sizes).nbytes == 4 * PREFETCH_BYTES_MIN
    assert limit_of(*sizes, given_bytes=0).nbytes == 0


def test_the_least_is_for_each_drive() -> None:
    sizes = [2 * PREFETCH_BYTES_MIN] * REPEATED_COUNT_MIN
    limits = [limit_of(*sizes, drive_count=count).nbytes for count in (1, 4, 8)]
    assert limits == [4 * PREFETCH_BYTES_MIN, 4 * PREFETCH_BYTES_MIN, 8 * PREFETCH_BYTES_MIN]
    assert limit_of(given_bytes=4096, drive_count=8).nbytes == 4096


def test_one_that_is_stored_in_another_dtype_counts_with_its_new_size() -> None:
    limit = limit_of(*[20] * REPEATED_COUNT_MIN)
    for _ in range(REPEATED_COUNT_MIN):
        limit.note_recast(20, 40)
    assert limit.repeated_bytes_max == 40
