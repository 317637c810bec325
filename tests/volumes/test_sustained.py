"""The rate of long writes: where it falls for good, when it has settled, and hiccups."""

from __future__ import annotations

import random

import pytest

from memascend.volumes.sustained import LEVEL_SAMPLES_MIN, Curve, End, first_drop, is_level

GB = 10**9
TICKET = GB // 50


def written(
    *levels: tuple[float, float], room_gb: float = 1000, noise: float = 0.0
) -> tuple[Curve, bool]:
    """Write to a drive until the curve has settled; return the curve, and whether it has.

    `levels` are GB, and the GB/s at which they are written; the last one has no end.
    """
    now, rng = [0.0], random.Random(1)
    curve = Curve(1.0, clock=lambda: now[0])
    total, left = 0.0, list(levels)
    taken = 0.0
    while total < room_gb * GB:
        if len(left) > 1 and taken >= left[0][0] * GB:
            left.pop(0)
            taken = 0.0
        now[0] += TICKET / (left[0][1] * GB * rng.uniform(1 - noise, 1 + noise))
        total += TICKET
        taken += TICKET
        if curve.note(TICKET):
            return curve, True
    return curve, False


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_small_cache_is_found_and_no_more_is_written_than_that_takes(noise: float) -> None:
    curve, is_settled = written((50, 4.7), (0, 0.7), noise=noise)
    assert is_settled
    assert curve.end is End.SETTLED
    assert curve.cache_bytes == pytest.approx(50 * GB, rel=0.06)
    assert curve.cache_rate == pytest.approx(4.7 * GB, rel=0.05)
    assert curve.sustained_rate == pytest.approx(0.7 * GB, rel=0.05)
    assert 99 * GB < curve.samples[-1].written_bytes < 110 * GB


def test_the_last_of_two_drops_counts_and_the_first_ends_the_cache() -> None:
    curve, is_settled = written((100, 4.5), (70, 2.0), (0, 0.5))
    assert is_settled
    assert curve.cache_bytes == pytest.approx(100 * GB, rel=0.05)
    assert curve.sustained_rate == pytest.approx(0.5 * GB, rel=0.05)


def test_a_small_drop_is_not_taken_for_the_end_of_the_cache() -> None:
    """A drive that is fast in two ways is written on until it is slow."""
    curve, is_settled = written((50, 5.0), (300, 3.5), (0, 0.13), room_gb=400)
    assert is_settled
    assert curve.samples[-1].written_bytes > 350 * GB
    assert curve.sustained_rate == pytest.approx(0.13 * GB, rel=0.05)


def test_a_steady_drive_is_written_to_the_end_and_has_no_drop() -> None:
    curve, is_settled = written((0, 3.0), room_gb=200, noise=0.2)
    assert not is_settled
    assert (curve.end, curve.cache_bytes, curve.cache_rate) == (End.NO_DROP, None, None)
    assert curve.sustained_rate == pytest.approx(3 * GB, rel=0.05)


def test_a_drive_that_fell_just_now_has_not_settled() -> None:
    curve, is_settled = written((100, 4.0), (0, 1.0), room_gb=110)
    assert not is_settled
    assert curve.end is End.FALLING
    assert curve.sustained_rate == pytest.approx(GB, rel=0.05)


def test_a_hiccup_is_no_drop() -> None:
    assert first_drop([4.0] * 20 + [0.1] * 2 + [4.0] * 20) is None
    assert first_drop([4.0] * 20 + [0.1] * 2) is None
    assert first_drop([4.0] * 20 + [0.1] * 3) == 20
    assert first_drop([]) is None


def test_a_level_is_long_and_does_not_fall() -> None:
    assert is_level([1.0] * LEVEL_SAMPLES_MIN)
    assert not is_level([1.0] * (LEVEL_SAMPLES_MIN - 1))
    assert not is_level([2.0 - 0.02 * n for n in range(60)])


def test_without_a_whole_interval_there_is_no_rate() -> None:
    curve, _ = written((0, 10.0), room_gb=5)
    assert (curve.samples, curve.sustained_rate, curve.end) == ([], 0.0, End.NO_DROP)
