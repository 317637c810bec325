"""How far the host may run ahead of a device is a small share of its memory."""

from __future__ import annotations

from memascend.base.device_memory import RELEASED_BYTES_MIN, released_bytes_max
from memascend.base.units import GIB


def test_a_small_device_keeps_the_least_and_a_larger_one_a_share() -> None:
    assert [released_bytes_max(size * GIB) for size in (2, 4, 8)] == [RELEASED_BYTES_MIN] * 3
    assert released_bytes_max(80 * GIB) == 5 * RELEASED_BYTES_MIN
    assert released_bytes_max(24 * GIB) == released_bytes_max(48 * GIB) == 3 * RELEASED_BYTES_MIN


def test_of_devices_that_can_train_it_is_at_most_a_thirtieth() -> None:
    assert all(released_bytes_max(size * GIB) <= size * GIB / 30 for size in range(8, 300))
