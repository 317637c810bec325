"""The account of one rank: what its sums are made of, and how long the drive alone needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memascend.errors import ConfigError
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
    ("read", "write", "seconds"),
    [
        (2, 1, 6 / 2 + 9 / 1),  # the passes wait for reads, the optimizer for writes
        (1, 2, 6 / 1 + 8 / 1),
        (8, 1, 2 / 1 + 9 / 1),
        (0.5, 1000, 6 / 0.5 + 8 / 0.5),
    ],
)
def test_the_floor_adds_the_passes_and_the_optimizer(
    read: float, write: float, seconds: float
) -> None:
    found = footprint().step_seconds(read_gb_s=read, write_gb_s=write)
    assert found == pytest.approx(seconds)
    shared = footprint().step_seconds(read_gb_s=read, write_gb_s=write, ranks=4)
    assert shared == pytest.approx(4 * seconds)


@pytest.mark.parametrize(("read", "write"), [(0, 1), (1, 0), (-1, 1), (1, -0.5)])
def test_a_drive_without_a_speed_is_an_error(read: float, write: float) -> None:
    with pytest.raises(ConfigError, match="above 0") as caught:
        footprint().step_seconds(read_gb_s=read, write_gb_s=write)
    assert f"{read}, {write}" in str(caught.value)


def test_a_footprint_is_a_plain_frozen_value() -> None:
    assert footprint() == footprint()
    with pytest.raises(dataclasses.FrozenInstanceError):
        footprint().passes_read_bytes = 1  # type: ignore[misc]
