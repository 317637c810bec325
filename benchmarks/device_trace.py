"""What a device did during one training step, and what it waited for, from a profiler's trace.

Reads the JSON that torch's profiler exports (Chrome's format, microseconds). Pure: knows neither
torch nor what was trained. The training program names the parts of a step by STEP, OPTIMIZER and
DRIVE, and the profiler names copies by where they begin and end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Spans of the host, as the training program calls them.
STEP, OPTIMIZER, DRIVE = "memascend: step", "memascend: optimizer", "memascend: drive"
#: Up to so many bytes CUDA takes a pageable source along with the command, and nobody waits.
PAGEABLE_BYTES_MAX = 64 << 10
#: What a device may wait for, in the order in which a moment of several is counted.
CAUSES = ("other devices", "copies", "the drive", "the optimizer on the host", "the host")

Spans = list[tuple[float, float]]
_COPY = re.compile(r"Memcpy (HtoD|DtoH) \((\w+) -> (\w+)\)")


class NoKernels(ValueError):
    """A trace has no kernel: it was made on the CPU, or the profiler (CUPTI) sees no device."""


def summary(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return seconds, bytes and shares of the one step in a trace.

    Returns:
        `step_s`; `kernel_s`: when a kernel ran; `copy_s`: when a copy from or to the host did;
        `overlap_share`: the part of it during which a kernel ran; `waits`: shares of the step
        without a kernel, by cause; `waiting_share`: their sum; `copied_bytes` by direction;
        `pageable`: name and bytes of each copy that made the host wait.

    Raises:
        ValueError: No step is in the trace.
        NoKernels: Nothing of a device is in the trace.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = {
        name: _spans(_named(events, "user_annotation", name)) for name in (STEP, OPTIMIZER, DRIVE)
    }
    if len(marks[STEP]) != 1:
        raise ValueError(f"the trace has {len(marks[STEP])} spans {STEP!r}, it should have one")
    step = marks[STEP]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memset")]
    copies = [event for event in events if _COPY.match(event["name"])]
    if not kernels:
        raise NoKernels("the trace has no kernel: was it made on the CPU, or without CUPTI?")
    collective = _spans(event for event in kernels if event["name"].startswith("nccl"))
    computing = _spans(event for event in kernels if not event["name"].startswith("nccl"))
    copying = common(_spans(copies), step)
    idle = without(step, computing)
    waits: dict[str, float] = {}
    left = idle
    for cause, spans in zip(
        CAUSES, (collective, copying, marks[DRIVE], marks[OPTIMIZER], step), strict=True
    ):
        waits[cause] = length(common(left, spans)) / length(step)
        left = without(left, spans)
    return {
        "step_s": length(step) / 1e6,
        "kernel_s": length(common(computing, step)) / 1e6,
        "copy_s": length(copying) / 1e6,
        "overlap_share": length(common(copying, computing)) / max(length(copying), 1e-9),
        "waiting_share": length(idle) / length(step),
        "waits": waits,
        "copied_bytes": _copied_bytes(copies),
        "pageable": [
            [event["name"], _nbytes(event)]
            for event in copies
            if "Pageable" in event["name"] and _nbytes(event) > PAGEABLE_BYTES_MAX
        ],
    }


def read(path: Path) -> dict[str, Any]:
    """Return the summary of a file."""
    with path.open(encoding="utf-8") as file:
        return summary(json.load(file))


# -- spans of time: sorted, and apart from each other -------------------------------------------


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the same moments, each once."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def without(spans: Spans, others: Spans) -> Spans:
    """Return the moments that are in none of the others."""
    left: Spans = []
    rest = iter(others)
    other = next(rest, None)
    for begin, end in spans:
        while other is not None and other[1] <= begin:
            other = next(rest, None)
        while other is not None and other[0] < end:
            if other[0] > begin:
                left.append((begin, other[0]))
            begin = min(end, other[1])
            if other[1] >= end:  # it may reach into the next one, too
                break
            other = next(rest, None)
        if begin < end:
            left.append((begin, end))
    return left


def common(spans: Spans, others: Spans) -> Spans:
    """Return the moments that are in both."""
    return without(spans, without(spans, others))


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


# -- events --------------------------------------------------------------------------------------


def _named(events: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("cat") == kind and event["name"] == name]


def _spans(events: Iterable[Mapping[str, Any]]) -> Spans:
    return union((float(one["ts"]), float(one["ts"]) + float(one["dur"])) for one in events)


def _nbytes(event: Mapping[str, Any]) -> int:
    return int(event.get("args", {}).get("bytes", 0))


def _copied_bytes(copies: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    found = {"HtoD": 0, "DtoH": 0}
    for event in copies:
        match = _COPY.match(event["name"])
        assert match is not None
        found[match.group(1)] += _nbytes(event)
    return found
