"""What the tests of parity share: the names of cases, which of them run always, and who trained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.cases import Case
from tests.parity.workers import Facts


def case_name(case: Case) -> str:
    return case.name


def quick(cases: list[Case], *numbers: int) -> list[Any]:
    """Have the cases of these numbers run in every test run, and the others in the full one.

    Those that repeat others run in `make test-device` alone.
    """
    often, seldom = pytest.mark.full, pytest.mark.matrix
    return [
        pytest.param(
            case,
            marks=[] if number in numbers else [often, seldom] if case.repeats else [often],
        )
        for number, case in enumerate(cases)
    ]


def assert_steps_went_behind(case: Case, facts: list[Facts]) -> None:
    """Equal bits prove nothing of steps behind their caller if none was, or was met there."""
    for rank in facts:
        walks = rank["walks"]
        # A gradient that a script has set in another dtype has its step over first.
        taken = case.steps - rank["skipped_steps"] - (case.accessors == "change")
        assert walks["begun"] == (0 if case.walk == "off" else taken), walks
        if case.walk == "late":
            # Each is met by the forward pass after it: not the last, nor one that a save has met.
            unmet = 1 + (case.save_at > 0) + (case.resume_at > 0)
            assert walks["met"] >= taken - unmet > 0, walks


def assert_activations_went(case: Case, facts: list[Facts]) -> None:
    """Equal bits prove nothing of activations on the drive if they stayed on the device."""
    for rank in facts:
        traffic = rank["ledger"]["activations"]
        assert traffic["count"] >= case.steps * case.accumulation, traffic
        assert traffic["written_bytes"] > 0
        assert traffic["device_bytes_peak"] < traffic["saved_bytes"], traffic
        assert traffic["read_bytes"] <= traffic["written_bytes"] <= traffic["saved_bytes"]


def assert_memascend_did_it(case: Case, facts: list[Facts]) -> None:
    """Equal bits prove nothing if stock, or nobody, did the swapping."""
    for rank in facts:
        optimizer, swappers = rank["optimizer_class"], rank["swapper_classes"]
        assert optimizer.startswith("memascend."), optimizer
        if case.params == "nvme" and "buffer_pool" in case.sections:
            assert [name.split(".")[0] for name in swappers] == ["memascend"], swappers
        if case.params == "nvme" and case.resident_numel_max == 0:
            assert rank["placement"]["nvme"] > 0, rank["placement"]
