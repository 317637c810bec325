"""The time that a drive takes: for reads, for writes, and for both at the same time."""

from __future__ import annotations

import math

import pytest

from memascend.errors import ConfigError
from memascend.plan.drive_rates import READ_GB_S, WRITE_GB_S, DriveRates

GB = 10**9


@pytest.mark.parametrize(
    ("mixed", "read", "written", "seconds"),
    [
        (1.6, 30, 0, 10),  # nothing is written, so the mixed rate does not matter
        (1.6, 0, 8, 8),
        (1.6, 8, 8, 10),  # 16 of both
        (1.6, 20, 8, 10 + 12 / 3),  # the rest of the reads has the drive to itself
        (1.6, 8, 20, 10 + 12 / 1),
        (100.0, 30, 8, 10),  # the drive does both as fast as either alone
        (100.0, 8, 12, 12),
    ],
)
def test_the_slowest_of_reads_writes_and_both_counts(
    mixed: float, read: int, written: int, seconds: float
) -> None:
    rates = DriveRates(read_gb_s=3.0, write_gb_s=1.0, mixed_gb_s=mixed)
    assert rates.seconds(read * GB, written * GB) == pytest.approx(seconds)


def test_without_a_mixed_rate_reads_and_writes_take_turns() -> None:
    rates = DriveRates(read_gb_s=3.0, write_gb_s=1.0)
    assert rates.both_gb_s == pytest.approx(1.5)
    for read, written in ((12, 0), (12, 4), (3, 8)):
        found = rates.seconds(read * GB, written * GB)
        assert found == pytest.approx(read / 3 + written / 1)


def test_the_defaults_are_those_of_a_modest_drive() -> None:
    assert DriveRates() == DriveRates(read_gb_s=READ_GB_S, write_gb_s=WRITE_GB_S)
    assert WRITE_GB_S <= 1.0


@pytest.mark.parametrize("name", ["read_gb_s", "write_gb_s", "mixed_gb_s"])
@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_no_drive_has_is_an_error(name: str, rate: float) -> None:
    with pytest.raises(ConfigError, match="above 0") as caught:
        DriveRates(**{name: rate})
    assert str(rate) in str(caught.value)
