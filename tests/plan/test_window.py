"""What the micro-steps of a window keep and move, for one element."""

from __future__ import annotations

import pytest

from memascend.base.sizes import APPENDED_COUNT_MAX
from memascend.plan.window import WindowBytes


@pytest.mark.parametrize(
    ("steps", "kept", "read", "written"),
    [
        (1, 4, 0, 4),
        (2, 4 + 2, 2, 2 + 4),
        (8, 4 + 14, 14, 14 + 4),
        # The eighth makes a sum beside the one that is seen; the ninth adds to it.
        (9, 8 + 14, 14 + 4, 14 + 4 + 4),
        (16, 8 + 14, 28 + 4, 28 + 4 + 4),
        (17, 8 + 14, 28 + 8, 28 + 8 + 4),
    ],
)
def test_gradients_narrower_than_their_sum_wait(
    steps: int, kept: int, read: int, written: int
) -> None:
    window = WindowBytes(steps=steps, arriving_itemsize=2, sum_itemsize=4)
    assert window.appends == (steps > 1)
    assert (window.drive_bytes, window.read_bytes, window.written_bytes) == (kept, read, written)


@pytest.mark.parametrize(("steps", "sums"), [(1, 1), (2, 2), (64, 2)])
@pytest.mark.parametrize(("arriving", "itemsize"), [(2, 2), (4, 4), (4, 2)])
def test_others_are_added_as_they_come(steps: int, sums: int, arriving: int, itemsize: int) -> None:
    window = WindowBytes(steps=steps, arriving_itemsize=arriving, sum_itemsize=itemsize)
    assert (window.appends, window.places, window.sums) == (False, 0, sums)
    assert window.drive_bytes == sums * itemsize
    assert window.read_bytes == (steps - 1) * itemsize
    assert window.written_bytes == steps * itemsize


def test_the_places_of_a_window_are_limited() -> None:
    window = WindowBytes(steps=1000, arriving_itemsize=2, sum_itemsize=4)
    assert window.places == APPENDED_COUNT_MAX
