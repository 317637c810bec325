"""One log line: how long training waits for the drives, and if a drive is the bottleneck. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memascend.monitor.clock import StepTimes
from memascend.monitor.status import VolumeRate

#: A drive that is busy for this part of the time or more determines the step time.
BUSY_SHARE_HIGH = 0.8


def describe_bottleneck(times: StepTimes, rates: Sequence[VolumeRate], *, step_count: int) -> str:
    """Return the mean times and the rates over the same steps, and their meaning, as one line."""
    busiest = max(rates, key=lambda rate: rate.busy)
    text = (
        f"over {step_count} steps of {times.total:.2f} s {busiest.path} was busy for "
        f"{100 * busiest.busy:.0f} % of the time ({busiest.read / 1e9:.2f} GB/s read, "
        f"{busiest.written / 1e9:.2f} GB/s written), and training waited {times.waited:.2f} s of a "
        "step for the drives"
    )
    if busiest.busy < BUSY_SHARE_HIGH:
        return f"{text}: the drive is not the bottleneck"
    return (
        f"{text}: the drive is the bottleneck. One twice as fast would save up to "
        f"{busiest.busy * times.total / 2:.2f} s of a step; so may a second one "
        "(memascend.volumes), more host memory, or more tokens in a step"
    )
