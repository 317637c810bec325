"""The rate at which a drive writes for long, and where its write cache ends.

A consumer drive writes to a part of its cells in a fast way first, and slowly when those are full.
A curve is the rate of writes over time; it tells where the rate fell for good, and whether it is
level since. Pure, apart from the clock; a curve is used by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

#: A rate that falls to less than this part, and stays there, is a drop.
DROP = 0.75
#: Below this part of the rate at first the cache is taken to be full: drives with two kinds of fast
#: cells have a smaller drop before.
_FULL = 0.5
#: Samples on either side of a drop; fewer may be a hiccup.
_SIDE_SAMPLES_MIN = 3
#: Samples of a level: a rate that has settled has at least as many, half of which are compared with
#: the other half.
LEVEL_SAMPLES_MIN = 30
_LEVEL_RATIO = 0.1


class End(Enum):
    """The state of a drive at the end of a curve."""

    SETTLED = "settled"  # the rate fell, and is level since
    FALLING = "falling"  # the rate fell, and is not level yet, or not for long
    NO_DROP = "no drop"  # the rate never fell for good: no cache, or a larger one


@dataclass(frozen=True, slots=True)
class Sample:
    """The rate in one interval."""

    written_bytes: int  # bytes written since the start, at the end of the interval
    seconds: float  # seconds since the start, likewise
    rate: float  # bytes per second in the interval


class Curve:
    """The rate of writes in equal intervals."""

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin; the first interval starts with the first write that ends."""
        self.samples: list[Sample] = []
        self._interval_s, self._clock = interval_s, clock
        self._began_s: float | None = None
        self._sampled_s, self._sampled_bytes, self._written_bytes = 0.0, 0, 0

    def note(self, nbytes: int) -> bool:
        """Count a write that has ended; return whether the rate has settled.

        It has when it is level, at less than half of what it was, for as many bytes as the cache
        took.
        """
        now = self._clock()
        self._written_bytes += nbytes
        if self._began_s is None:
            self._began_s = self._sampled_s = now
            self._sampled_bytes = self._written_bytes
        elapsed_s = now - self._sampled_s
        if elapsed_s < self._interval_s:
            return False
        rate = (self._written_bytes - self._sampled_bytes) / elapsed_s
        self.samples.append(Sample(self._written_bytes, now - self._began_s, rate))
        self._sampled_s, self._sampled_bytes = now, self._written_bytes
        if self.end is not End.SETTLED:
            return False
        is_full = self.sustained_rate < _FULL * (self.cache_rate or 0.0)
        return is_full and self._written_bytes >= 2 * (self.cache_bytes or 0)

    @property
    def end(self) -> End:
        """The state of the drive now."""
        drop = first_drop(self._rates)
        if drop is None:
            return End.NO_DROP
        return End.SETTLED if is_level(self._rates[drop:]) else End.FALLING

    @property
    def cache_bytes(self) -> int | None:
        """Bytes written before the rate fell for the first time; None if it did not."""
        drop = first_drop(self._rates)
        return None if drop is None else self.samples[drop - 1].written_bytes

    @property
    def cache_rate(self) -> float | None:
        """Bytes per second before the rate fell; None if it did not."""
        drop = first_drop(self._rates)
        return None if drop is None else _mean(self._rates[:drop])

    @property
    def sustained_rate(self) -> float:
        """Bytes per second in the last half of the samples since the drop, or of all of them.

        0 without samples.
        """
        rates = self._rates[first_drop(self._rates) or 0 :]
        return _mean(rates[len(rates) // 2 :]) if rates else 0.0

    @property
    def _rates(self) -> list[float]:
        return [sample.rate for sample in self.samples]


def first_drop(rates: Sequence[float]) -> int | None:
    """Return the number of samples before the first lasting drop; None without one.

    A drop divides the rates so that both parts differ least within themselves.
    """
    drop = None
    while (earlier := _sharpest_drop(rates if drop is None else rates[:drop])) is not None:
        drop = earlier
    return drop


def is_level(rates: Sequence[float]) -> bool:
    """Return whether the last half of rates is long and level."""
    last = rates[len(rates) // 2 :]
    middle = len(last) // 2
    if len(rates) < LEVEL_SAMPLES_MIN:
        return False
    return abs(_mean(last[:middle]) - _mean(last[middle:])) <= _LEVEL_RATIO * _mean(last)


def _sharpest_drop(rates: Sequence[float]) -> int | None:
    total, before, best, best_gain = sum(rates), 0.0, None, 0.0
    for count in range(1, len(rates) - _SIDE_SAMPLES_MIN + 1):
        before += rates[count - 1]
        if count < _SIDE_SAMPLES_MIN:
            continue
        mean_before, mean_after = before / count, (total - before) / (len(rates) - count)
        if max(rates[count : count + _SIDE_SAMPLES_MIN]) >= DROP * mean_before:
            continue
        gain = count * (len(rates) - count) * (mean_before - mean_after) ** 2
        if mean_after < DROP * mean_before and gain > best_gain:
            best, best_gain = count, gain
    return best


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
