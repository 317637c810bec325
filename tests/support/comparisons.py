"""Comparisons as they are recorded, without a run: what tables, files and pages are made of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from memascend.base.units import MIB
from memascend.cli.compare.report import Report
from memascend.cli.compare.run import Column, Run
from memascend.ledger.trace import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    OTHER,
    SETUP,
    Mark,
    Measures,
    Recording,
)
from memascend.system.processes import DriveSample, Peaks, Sample

LATENCY = {"count": 8, "p50_s": 0.001, "p99_s": 0.002, "p999_s": 0.002, "longest_s": 0.0125}


def make_run(name: str, *losses: str, rss: tuple[int, ...] = (100, 200), **changes: Any) -> Run:
    """Return a run of one process whose resident MiB were these, a second each."""
    samples = [
        Sample(float(second), {7: size * MIB}, locked_bytes=MIB, registered_bytes=2 * MIB)
        for second, size in enumerate(rss)
    ]
    settings: dict[str, Any] = {
        "exit_status": 0,
        "losses": list(losses),
        "loss_times_s": [2.0 * index for index in range(len(losses))],
        "samples": samples,
        "peaks": Peaks(pss_bytes=90 * MIB, disk_bytes=0, process_rss_bytes={7: 210 * MIB}),
        "io_bytes": (MIB, 0),
    }
    return Run(Column(name, {"A": name}), Path("/none", f"{name}.log"), **(settings | changes))


def make_report(
    *runs: Run,
    baseline_bytes: int = 0,
    skipped: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
) -> Report:
    """Return the report of these runs."""
    command = ["train.py", "--name", "a b"]
    return Report(command, baseline_bytes, runs, skipped or {}, config or {})


def make_marks(*, steps: int = 3) -> list[Mark]:
    """Return the marks of steps of 10 s each, behind a second of setup.

    Forward takes 2 s, 1 of them waiting for the drive; backward 4 s; the optimizer 3 s, 1 of them
    waiting for the device; what comes between 1 s, half of it waiting for the optimizer. The first
    step takes a second more.
    """
    components = {"staging slots": 8 * MIB, "optimizer tiles": 4 * MIB}
    marks = [
        Mark(100.0, SETUP, Measures(components={"staging slots": 2 * MIB})),
        Mark(101.0, SETUP, Measures(components=components)),
    ]
    waits = {
        FORWARD: (2.0, 1.0, 0.0, 0.0),
        BACKWARD: (4.0, 0.0, 0.0, 0.0),
        OPTIMIZER: (3.0, 0.0, 1.0, 0.0),
        OTHER: (1.0, 0.0, 0.0, 0.5),
    }
    for step in range(steps):
        for phase, (seconds, drive, device, optimizer) in waits.items():
            last = marks[-1]
            measures = Measures(
                components=components,
                read_bytes=last.measures.read_bytes + 16 * MIB,
                written_bytes=last.measures.written_bytes + 32 * MIB,
                drive_wait_s=last.measures.drive_wait_s + drive,
                device_wait_s=last.measures.device_wait_s + device,
                optimizer_wait_s=last.measures.optimizer_wait_s + optimizer,
            )
            slower = 1.0 if step == 0 and phase == FORWARD else 0.0
            marks.append(Mark(last.time_s + seconds + slower, phase, measures))
    return marks


def make_recording() -> Recording:
    """Return what a run of three steps on one volume has left."""
    volume = {
        "path": "/mnt/ssd/<swap>",
        "bytes_read": 192 * MIB,
        "bytes_written": 384 * MIB,
        "busy_s": 3.5,
        "reads": LATENCY,
        "writes": LATENCY,
        "needed": LATENCY,
    }
    rows = [
        {"component": "staging slots", "planned_bytes": 8 * MIB, "peak_bytes": 8 * MIB},
        {"component": "optimizer tiles", "planned_bytes": None, "peak_bytes": 4 * MIB},
    ]
    ledger = {
        "rows": rows,
        "planned_bytes": 8 * MIB,
        "held_bytes_peak": 14 * MIB,
        "other_bytes_peak": 90 * MIB,
        "volumes": [volume],
    }
    return Recording(make_marks(), ledger)


def make_comparison(*, repeat: int = 1, **changes: Any) -> Report:
    """Return the report of stock and memascend with all that a machine can tell of them."""
    counters = (
        SimpleNamespace(read_bytes=index * MIB, write_bytes=index * index * MIB)
        for index in range(20)
    )
    drives = [DriveSample(0.25 * index, {"nvme0n1": each}) for index, each in enumerate(counters)]
    runs = []
    for number in range(1, repeat + 1) if repeat > 1 else (0,):
        for name in ("stock", "memascend"):
            is_ours = name == "memascend"
            scale = 100 if is_ours else 400
            run = make_run(
                name,
                "4.125",
                "2.0",
                "1.0000000000000002",
                rss=tuple(scale + (17 * second + number) % 40 for second in range(60)),
                drive_samples=drives,
                number=number,
                started_s=99.0,
                recording=make_recording() if is_ours else Recording(),
            )
            runs.append(run)
    config = {"zero_optimization": {"stage": 3}, "memascend": {}, "note": "<b>&\"'"}
    return make_report(*runs, config=config, baseline_bytes=50 * MIB, **changes)
