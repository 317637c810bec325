"""The largest storage below a number, and the next one to prefetch, are those of a scan."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memascend.streaming.activations.stack import SavedStack


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 99)), max_size=90))
def test_the_largest_before_a_number_is_that_of_a_scan(steps: list[tuple[int, bool, int]]) -> None:
    stack, sizes = SavedStack(), {}
    for number, (nbytes, removes, which) in enumerate(steps):
        stack.push(2 * number, nbytes)
        sizes[2 * number] = nbytes
        if removes:
            removed = list(sizes)[which % len(sizes)]
            del sizes[removed]
            stack.remove(removed)
            stack.remove(removed)
        for end in (which, 2 * number, 2 * number + 1):
            before = [size for one, size in sizes.items() if one < end]
            assert stack.largest(end) == max(before, default=0)
        assert stack.largest() == max(sizes.values(), default=0)


def test_storages_that_are_removed_keep_no_entries() -> None:
    stack = SavedStack()
    stack.push(0, 7)
    for number in range(1, 1000):  # the one before is removed later: the end is never free
        stack.push(number, 7)
        stack.remove(number - 1)
    assert len(stack._entries) <= 16
    assert (stack.largest(), stack.largest(999)) == (7, 0)


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(0, 31))
def test_the_last_one_before_is_prefetched_next(
    known: set[int], left_out: set[int], number: int
) -> None:
    stack = SavedStack()
    for one in known:
        stack.prefetch(one)
        stack.prefetch(one)
    for one in left_out:
        stack.leave_out(one)
    assert stack.next_before(number) == max(
        (one for one in known - left_out if one < number), default=None
    )
    assert [one for one in range(31) if stack.prefetches(one)] == sorted(known - left_out)
