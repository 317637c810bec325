"""The account of one rank: what its sums are made of, and how long the drive alone needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memascend.plan.drive_rates import DriveRates
from memascend.plan.footprint import Footprint

GB = 10**9


def footprint(**changes: Any) -> Footprint:
    settings: dict[str, Any] = {
        "host": {"a": 10, "b": 5},
        "drive": {"parameters": 7, "gradients": 3},
        "read_bytes": {"parameters": 6 * GB, "optimizer state": 8 * GB},
        "written_bytes": {"gradients": 2 * GB, "optimizer state": 9 * GB},
        "passes_read_bytes": 6 * GB,
        "passes_written_bytes": 2 * GB,
    }
    return Footprint(**(settings | changes))


def test_sums_are_over_all_components_and_streams() -> None:
    assert (footprint().host_bytes, footprint().drive_bytes) == (15, 10)
    assert footprint(host={}, drive={}).host_bytes == footprint(host={}, drive={}).drive_bytes == 0


def test_what_comes_at_the_start_comes_together_and_in_a_step_one_after_the_other() -> None:
    extra = {"x": 4, "y": 3}
    found = footprint(host_initialization=extra, host_step=extra)
    assert found.initialization_bytes == 15 + 4 + 3
    assert found.step_bytes == 15 + 4
    assert found.peak_bytes == 15 + 4 + 3
    assert footprint(host_step=extra).peak_bytes == 15 + 4
    assert footprint().initialization_bytes == footprint().step_bytes == 15


@pytest.mark.parametrize(
    ("read", "write", "mixed", "seconds"),
    [
        (2, 1, 1e3, 6 / 2 + 9 / 1),  # the passes wait for reads, the optimizer for writes
        (1, 2, 1e3, 6 / 1 + 8 / 1),
        (8, 1, 1e3, 2 / 1 + 9 / 1),
        (0.5, 1000, 1e3, 6 / 0.5 + 8 / 0.5),
        (2, 2, 1, (4 / 1 + 4 / 2) + (16 / 1 + 1 / 2)),
        (2, 1, None, (6 / 2 + 2 / 1) + (8 / 2 + 9 / 1)),
    ],
)
def test_the_drive_time_adds_the_passes_and_the_optimizer(
    read: float, write: float, mixed: float | None, seconds: float
) -> None:
    rates = DriveRates(read_gb_s=read, write_gb_s=write, mixed_gb_s=mixed)
    assert footprint().step_seconds(rates) == pytest.approx(seconds)
    assert footprint().step_seconds(rates, ranks=4) == pytest.approx(4 * seconds)


def test_a_footprint_is_a_plain_frozen_value() -> None:
    assert footprint() == footprint()
    with pytest.raises(dataclasses.FrozenInstanceError):
        footprint().passes_read_bytes = 1  # type: ignore[misc]
