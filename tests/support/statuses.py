"""Statuses as ranks write them, for what reads and shows them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from memascend.ledger.ledger import Ledger, LedgerRow
from memascend.ledger.traffic import Latency, VolumeTraffic
from memascend.ledger.wear import Wear
from memascend.monitor.clock import BACKWARD, StepTimes
from memascend.monitor.runs import rank_path
from memascend.monitor.status import Status, VolumeRate, as_json
from memascend.system.identity import identify

RUN = "20260102T030405.678-42"
MIB = 1 << 20


def ledger(**changes: Any) -> Ledger:
    """The account of a rank with two components and one volume."""
    latency = Latency(count=100, p50_s=0.001, p99_s=0.002, p999_s=0.004, longest_s=0.008)
    volume = VolumeTraffic("/mnt/ssd", 6000 * MIB, 3000 * MIB, 12.5, latency, latency, latency)
    made = Ledger(
        rows=(
            LedgerRow("optimizer tiles", 40 * MIB, 40 * MIB, 40 * MIB),
            LedgerRow("staging slots", 8 * MIB, 6 * MIB, 8 * MIB),
        ),
        limit_bytes=64 * MIB,
        held_bytes=48 * MIB,
        held_bytes_peak=50 * MIB,
        resident_bytes=500 * MIB,
        resident_bytes_peak=600 * MIB,
        drive={"bytes_read": 6000 * MIB, "bytes_written": 3000 * MIB, "wait_seconds": 2.5},
        wear=Wear(3000 * MIB, 100 * MIB, 30, 60.0, endurance_bytes=600 * 10**12),
        volumes=(volume,),
    )
    return replace(made, **changes)


def status(*, rank: int = 0, **changes: Any) -> Status:
    """The status of a rank of this very process in its 31st step of 500."""
    times = StepTimes(forward=0.5, backward=1.0, optimizer=0.25, other=0.25, waited=0.75)
    made = Status(
        program="train.py",
        run=RUN,
        rank=rank,
        world_size=2,
        process=identify(os.getpid()),
        started_at=1_700_000_000.0,
        written_at=1_700_000_060.0,
        phase=BACKWARD,
        phase_seconds=0.5,
        step=30,
        steps_total=500,
        last=times,
        mean=times,
        samples_per_second=2.0,
        tokens_per_second=1024.0,
        rates=(VolumeRate("/mnt/ssd", 200e6, 100e6, 0.5),),
        ledger=ledger(),
    )
    return replace(made, **changes)


def write(root: Path, *statuses: Status) -> Path:
    """Write statuses as their ranks would, and return the folder of the last one's run."""
    path = root
    for one in statuses:
        path = rank_path(root, one.run, one.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(one))
    return path.parent
