"""The account of a profiler's trace, on one made by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import device_trace
import pytest


def event(cat: str, name: str, begin: float, end: float, nbytes: int = 0) -> dict[str, Any]:
    args = {"bytes": nbytes} if nbytes else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args}


def trace_of(*more: dict[str, Any]) -> dict[str, Any]:
    """A step of 100 us: kernels for 40, and a cause for each part of the rest."""
    events = [
        event("user_annotation", device_trace.STEP, 0, 100),
        event("user_annotation", device_trace.DRIVE, 30, 60),
        event("user_annotation", device_trace.OPTIMIZER, 55, 80),
        event("gpu_user_annotation", device_trace.STEP, 5, 95),  # the device's side of the same
        event("cpu_op", "aten::mm", 0, 5),
        event("kernel", "gemm", 0, 20),
        event("kernel", "gemm on another stream", 10, 30),
        event("kernel", "ncclDevKernel_AllGather", 90, 95),
        event("kernel", "last", 80, 90),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 25, 45, 1000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 46, 48, 7),
        event("kernel", "of the step before", -20, -10),
        {"ph": "i", "name": "an instant", "ts": 3},
    ]
    return {"traceEvents": [*events, *more]}


def test_every_moment_without_a_kernel_has_one_cause() -> None:
    found = device_trace.summary(trace_of())
    assert found["step_s"] == pytest.approx(100e-6)
    assert found["kernel_s"] == pytest.approx(40e-6)
    assert found["waiting_share"] == pytest.approx(0.60)
    expected = {
        "other devices": 0.05,  # the collective
        "copies": 0.15,  # 30 to 45
        "the drive": 0.15,  # 45 to 60
        "the optimizer on the host": 0.20,  # 60 to 80
        "the host": 0.05,  # 95 to 100
    }
    assert found["waits"] == pytest.approx(expected)
    assert sum(found["waits"].values()) == pytest.approx(found["waiting_share"])


def test_copies_of_the_host_are_counted_by_direction_and_by_what_runs_meanwhile() -> None:
    found = device_trace.summary(
        trace_of(event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 80, 90, 500))
    )
    assert found["copied_bytes"] == {"HtoD": 1000, "DtoH": 500}
    assert found["copy_s"] == pytest.approx(30e-6)
    assert found["overlap_share"] == pytest.approx(15 / 30)
    assert found["pageable"] == []


def test_only_pageable_copies_that_the_host_waits_for_are_told() -> None:
    large = device_trace.PAGEABLE_BYTES_MAX + 1
    found = device_trace.summary(
        trace_of(
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 50, 51, large),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 51, 52, 4),
        )
    )
    assert found["pageable"] == [["Memcpy HtoD (Pageable -> Device)", large]]


@pytest.mark.parametrize("absent", ["user_annotation", "kernel"])
def test_a_trace_of_no_step_or_no_device_is_refused(absent: str) -> None:
    left = [one for one in trace_of()["traceEvents"] if one.get("cat") != absent]
    with pytest.raises(ValueError, match="the trace has"):
        device_trace.summary({"traceEvents": left})


def test_a_trace_of_no_device_is_told_from_one_of_no_step() -> None:
    left = [one for one in trace_of()["traceEvents"] if one.get("cat") != "kernel"]
    with pytest.raises(device_trace.NoKernels):
        device_trace.summary({"traceEvents": left})


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace_of()))
    assert device_trace.read(path) == device_trace.summary(trace_of())


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_sets_of_moments(seed: int) -> None:
    draw = random.Random(seed)

    def some() -> device_trace.Spans:
        begins = [draw.randrange(40) for _ in range(draw.randrange(8))]
        return device_trace.union((begin, begin + draw.randrange(9)) for begin in begins)

    def moments(spans: device_trace.Spans) -> set[int]:
        return {moment for begin, end in spans for moment in range(int(begin), int(end))}

    one, other = some(), some()
    assert moments(device_trace.without(one, other)) == moments(one) - moments(other)
    assert moments(device_trace.common(one, other)) == moments(one) & moments(other)
    assert device_trace.length(one) == len(moments(one))
