"""Two drives of unlike speed: what striping makes of their bandwidth; `make bench-volumes`.

Both are loop devices, formatted as raw volumes and held to stated rates by a control group, so that
the answer does not depend on how many drives the machine has. Each alone, both with equal weights,
with weights stated as the rates are, and with those that memascend measures, take turns in every
round. The best there can be is the sum of the two alone. Needs root: loop devices, and a blkio
control group of version 1.

With `--equal N` they are N equal drives in memory, and need nothing: see equal_drives.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equal_drives
import harness
import torch

from memascend.base.sizes import BOUNCE_BYTES
from memascend.base.units import MIB
from memascend.config.block import parse_block
from memascend.nvme.store import TensorStore
from memascend.volumes.device import claimed, format_device
from memascend.volumes.prepare import prepared

MB = 10**6
DEVICE_BYTES = 1024 * MIB
BLKIO = Path("/sys/fs/cgroup/blkio")
KEY = "tensor"


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second of one store in one round."""

    write: float
    read: float


def main(arguments: list[str] | None = None) -> None:
    parser = harness.parser(__doc__ or "")
    parser.add_argument(
        "--mb-s", type=float, nargs=2, default=[100.0, 300.0], help="rates of the two (100 300)"
    )
    parser.add_argument("--mib", type=int, default=384, help="size of the tensor (384)")
    parser.add_argument("--engine", choices=["uring", "libaio", "threads"], default="uring")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--equal", type=int, metavar="N", help="N equal drives in memory instead")
    parser.add_argument(
        "--milliseconds", type=int, default=80, help="with --equal: time of a request (80)"
    )
    parser.add_argument(
        "--width",
        type=int,
        default=4,
        help="with --equal: requests a drive runs at a time (4)",
    )
    parser.add_argument("--shards", type=int, default=4, help="with --equal: shards of 16 Mi (4)")
    options = parser.parse_args(arguments)
    if options.equal is not None:
        equal_drives.run_and_report(options)
        return
    if os.geteuid() != 0 or not BLKIO.is_dir():
        sys.exit(f"needs root, for loop devices, and a control group at {BLKIO}")
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as folder,
        throttled_devices(Path(folder), options.mb_s) as devices,
    ):
        speeds = run(devices, Path(folder), options)
    report(speeds, options)


@contextlib.contextmanager
def throttled_devices(folder: Path, rates_mb_s: Sequence[float]) -> Iterator[list[str]]:
    """Loop devices with our header; this process can use each no faster than its rate."""
    with contextlib.ExitStack() as stack:
        devices = [
            stack.enter_context(loop_device(folder / f"{index}.image"))
            for index in range(len(rates_mb_s))
        ]
        for path in devices:
            with claimed(path) as device:
                format_device(device, owner_uid=0)
        group = BLKIO / f"memascend-bench-{os.getpid()}"
        group.mkdir()
        stack.callback(group.rmdir)
        for path, rate_mb_s in zip(devices, rates_mb_s, strict=True):
            number = os.stat(path).st_rdev
            line = f"{os.major(number)}:{os.minor(number)} {int(rate_mb_s * MB)}"
            for direction in ("read", "write"):
                (group / f"blkio.throttle.{direction}_bps_device").write_text(line)
        stack.callback((BLKIO / "cgroup.procs").write_text, str(os.getpid()))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield devices


@contextlib.contextmanager
def loop_device(image: Path) -> Iterator[str]:
    """A device over a new file whose blocks are there: nothing is answered without the drive."""
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DEVICE_BYTES)
    command = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield path
    finally:
        subprocess.run(["losetup", "--detach", path], check=True)


def run(
    devices: Sequence[str], folder: Path, options: argparse.Namespace
) -> dict[str, list[Speed]]:
    """The speeds of every contender, in order of the rounds."""
    both: list[dict[str, Any]] = [{"path": path, "raw": True} for path in devices]
    contenders = {
        f"{options.mb_s[0]:g} MB/s alone": both[:1],
        f"{options.mb_s[1]:g} MB/s alone": both[1:],
        "both, equal weights": [volume | {"weight": 1} for volume in both],
        "both, stated weights": [
            volume | {"weight": rate_mb_s / min(options.mb_s)}
            for volume, rate_mb_s in zip(both, options.mb_s, strict=True)
        ],
        "both, measured weights": both,
    }
    names = list(contenders)
    speeds: dict[str, list[Speed]] = {name: [] for name in names}
    for round_index in range(options.rounds):
        first = round_index % len(names)
        for name in names[first:] + names[:first]:
            speeds[name].append(measure(contenders[name], folder, options))
    return speeds


def measure(volumes: Sequence[dict[str, Any]], folder: Path, options: argparse.Namespace) -> Speed:
    """Writes and reads one large tensor through a new store, as training does."""
    config = parse_block({"volumes": list(volumes), "direct_nvme": {"engine": options.engine}})
    nbytes = options.mib * MIB
    tensor = torch.empty(nbytes, dtype=torch.uint8).random_()
    bounce = aligned(BOUNCE_BYTES)
    with prepared(config, "", cache=folder / "weights") as opened:
        store = TensorStore(volumes=opened, bounce=bounce, engine=options.engine)
    try:
        start = time.monotonic()
        store.write(key=KEY, source=tensor).wait()
        written = time.monotonic()
        store.read(key=KEY, target=tensor).wait()
        return Speed(nbytes / (written - start), nbytes / (time.monotonic() - written))
    finally:
        store.close()


def aligned(nbytes: int) -> torch.Tensor:
    """Page-aligned memory."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    memory = torch.empty(nbytes + page_bytes, dtype=torch.uint8)
    return memory[-memory.data_ptr() % page_bytes :][:nbytes]


def report(speeds: dict[str, list[Speed]], options: argparse.Namespace) -> None:
    """One row for each contender: MB/s, and the share of what the two alone give together."""
    alone = list(speeds)[:2]
    rows = []
    for name, rounds in speeds.items():
        figures: dict[str, Any] = {}
        for direction in ("write", "read"):
            rates = [getattr(speed, direction) for speed in rounds]
            sums = [
                sum(getattr(speeds[single][index], direction) for single in alone)
                for index in range(len(rounds))
            ]
            shares = [rate / total for rate, total in zip(rates, sums, strict=True)]
            figures[f"{direction} MB/s"] = harness.spread([rate / MB for rate in rates]).text(0)
            figures[f"{direction}, of the sum"] = harness.spread(shares).text()
        config = {"mib": options.mib, "mb_s": options.mb_s, "engine": options.engine}
        rows.append(harness.Row("volumes", "one tensor", name, figures, config, harness.machine()))
    harness.report("volumes", "Two drives of unlike speed", rows, options.out)


if __name__ == "__main__":
    main()
