"""A key in memory: how much of a transfer lies there, and what may be read in place."""

from __future__ import annotations

import pytest
import torch

from memascend._core import FreeSpace
from memascend.base.units import PAGE_BYTES
from memascend.nvme.resident_keys import ResidentKey, find_run

BLOCK = torch.zeros(4 * PAGE_BYTES, dtype=torch.uint8)


def key(nbytes: int, *, begin: int = 0, head_bytes: int | None = None) -> ResidentKey:
    count = nbytes if head_bytes is None else head_bytes
    run = FreeSpace(BLOCK.numel()).take(begin=begin, nbytes=count)
    return ResidentKey("one", nbytes, run, BLOCK[begin : begin + count])


@pytest.mark.parametrize(
    ("offset", "nbytes", "count"),
    [(0, 100, 60), (0, 60, 60), (59, 41, 1), (60, 40, 0), (10, 5, 5), (100, 0, 0)],
)
def test_of_a_transfer_the_part_before_the_border_is_in_memory(
    offset: int, nbytes: int, count: int
) -> None:
    assert key(100, head_bytes=60).count_in_head("one.a", offset, nbytes) == count


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (100, 1), (0, 101)])
def test_a_transfer_outside_the_key_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"one\.a.*has 100"):
        key(100).count_in_head("one.a", offset, nbytes)


def test_only_a_key_that_is_whole_and_aligned_holds_elements() -> None:
    assert key(64).holds(torch.float32)
    assert not key(64, head_bytes=32).holds(torch.float32)
    assert [key(64, begin=6).holds(dtype) for dtype in (torch.float32, torch.bfloat16)] == [
        False,
        True,
    ]


def test_odd_sizes_are_taken_from_the_end_and_pages_from_the_beginning() -> None:
    space, taken = FreeSpace(BLOCK.numel()), []

    def take(nbytes: int) -> tuple[int, int] | None:
        found = find_run(space, nbytes)
        if found is not None:
            taken.append(space.take(begin=found[0], nbytes=found[1]))
        return found

    assert take(0) is None
    assert take(PAGE_BYTES) == (0, PAGE_BYTES)
    assert take(10) == (BLOCK.numel() - 10, 10)
    # If the key is too large: its head, in whole pages.
    assert take(BLOCK.numel()) == (PAGE_BYTES, 2 * PAGE_BYTES)
    assert take(2 * PAGE_BYTES) is None
    assert find_run(space, BLOCK.numel(), besides=taken[0]) == (0, PAGE_BYTES)
    # All that is free behind the first page, and an odd size at its end.
    assert find_run(space, PAGE_BYTES + 1, besides=taken[-1]) == (
        3 * PAGE_BYTES - 11,
        PAGE_BYTES + 1,
    )
