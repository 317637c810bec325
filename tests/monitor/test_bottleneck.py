"""The drive is named as what holds training up where it is, with what a faster one would save."""

from __future__ import annotations

from memascend.monitor.bottleneck import describe_bottleneck
from memascend.monitor.clock import StepTimes
from memascend.monitor.status import VolumeRate

TIMES = StepTimes(forward=1, backward=2, optimizer=0.5, other=0.5, waited=1.25)


def test_a_drive_that_is_busy_all_the_time_is_the_bottleneck() -> None:
    rates = [VolumeRate("/mnt/a", 1e9, 1e9, 0.2), VolumeRate("/mnt/b", 2.5e9, 1.5e9, 0.9)]
    text = describe_bottleneck(TIMES, rates, step_count=20)
    for part in (
        "over 20 steps of 4.00 s /mnt/b was busy for 90 % of the time",
        "2.50 GB/s read, 1.50 GB/s written",
        "training waited 1.25 s of a step",
        "is the bottleneck. One twice as fast would save up to 1.80 s",
    ):
        assert part in text


def test_one_that_is_idle_most_of_the_time_is_not() -> None:
    text = describe_bottleneck(TIMES, [VolumeRate("/mnt/a", 1e9, 1e9, 0.5)], step_count=20)
    assert text.endswith("the drive is not the bottleneck")
