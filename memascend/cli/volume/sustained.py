"""`memascend volume bench --sustained`: the rate at which drives write for long.

All drives are written at the same time, each until its rate has settled or its share of free space
is written. Then reads and writes together, and reads alone, are measured with the cache still full.
The rates are kept for `memascend plan --config` and `memascend doctor`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from memascend import _core
from memascend.base.charts import Quantity, Series, line_chart
from memascend.base.progress import byte_progress
from memascend.base.units import format_nbytes
from memascend.cli.shared.picture import check_picture, write_picture
from memascend.cli.volume.bench import opened_volumes
from memascend.config.block import DirectNvmeConfig
from memascend.config.environment import cache_directory
from memascend.errors import StoreError
from memascend.version import __version__
from memascend.volumes.kept import KeptRates, identity, keep_rates
from memascend.volumes.speed import Bench, Load
from memascend.volumes.sustained import Curve, End

SHARE = 0.5
#: Measurements after the writes are so many times as long as an interval of the curve.
_INTERVALS_AFTER = 10
_ROWS_MAX = 20
_BAR_WIDTH = 40
_GB = 10**9


def sustained_command(args: argparse.Namespace) -> int:
    """Measure, print, keep the rates, and return the exit status."""
    if args.plot is not None:
        check_picture(args.plot)
    share = args.share or SHARE
    with opened_volumes(args.paths) as volumes:
        rooms = {volume.path: _room_bytes(volume) for volume in volumes}
        for path, nbytes in rooms.items():
            print(
                f"memascend: writes up to {share * nbytes / _GB:.0f} GB to {path}, {share:.0%} of "
                "its free space; Ctrl-C ends it, and the space is free again",
                file=sys.stderr,
            )
        report = measure_sustained(volumes, args, share)
    for drive in report["drives"]:
        if drive["is_kept"]:
            found = (drive[name] / _GB for name in ("read", "write", "mixed"))
            keep_rates(drive["path"], KeptRates(*found), cache=cache_directory())
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if args.plot is not None:
        _plot(report, args)
    return 0


def _room_bytes(volume: _core.VolumeOptions) -> int:
    """Return the free space of a folder's file system, or the size of a raw volume."""
    return volume.capacity_bytes if volume.descriptor >= 0 else shutil.disk_usage(volume.path).free


def measure_sustained(
    volumes: Sequence[_core.VolumeOptions], args: argparse.Namespace, share: float
) -> dict[str, Any]:
    """Return everything that is measured, by name; `share` of the free space is the maximum.

    Raises:
        StoreError: A drive ended before one interval did, or a transfer failed.
    """
    defaults = DirectNvmeConfig()
    load = Load(
        chunk_bytes=args.chunk[0] if args.chunk else defaults.chunk_bytes,
        queue_depth=args.depth[0] if args.depth else defaults.queue_depth,
        engine=args.engine,
        span_bytes=1 << 60,
        span_share=share,
        fill_seconds=float("inf"),
    )
    curves = [Curve(args.seconds) for _ in volumes]
    title = f"writing until the rate settles, at most {load.span_share:.0%} of free space"
    with (
        byte_progress(title, None, leads=True) as meter,
        Bench(volumes, load, meter, [curve.note for curve in curves]) as bench,
    ):
        written = [traffic["bytes_written"] for traffic in bench.traffic()]
        after_s = _INTERVALS_AFTER * args.seconds
        meter.describe("reading and writing with the cache full")
        mixed = bench.run("mixed", after_s)
        meter.describe("reading")
        read = bench.run("read", after_s)
        engine = bench.engine
    drives = [
        _drive(volume.path, curve, written_bytes, share) | {"mixed": mixed_rate, "read": read_rate}
        for volume, curve, written_bytes, mixed_rate, read_rate in zip(
            volumes, curves, written, mixed, read, strict=True
        )
    ]
    return {
        "version": __version__,
        "kernel": platform.release(),
        "engine": engine,
        "chosen": {"chunk_bytes": load.chunk_bytes, "queue_depth": load.queue_depth},
        "share": load.span_share,
        "drives": drives,
    }


def _drive(path: str, curve: Curve, written_bytes: int, share: float) -> dict[str, Any]:
    if not curve.samples:
        raise StoreError(
            0,
            f"{path}: {format_nbytes(written_bytes)} were written in less than one interval, too "
            "few for a rate. More of the free space (--share), or shorter intervals (--seconds)",
        )
    return {
        "path": path,
        "drive": identity(path),
        "write": curve.sustained_rate,
        "state": curve.end.value,
        # Within a cache that may be larger the rate is not what training gets.
        "is_kept": curve.end is not End.NO_DROP or share >= SHARE,
        "cache_bytes": curve.cache_bytes,
        "cache_rate": curve.cache_rate,
        "written_bytes": written_bytes,
        "curve": [
            {"written_bytes": one.written_bytes, "seconds": one.seconds, "rate": one.rate}
            for one in curve.samples
        ],
    }


# -- showing ---------------------------------------------------------------------------------------


def _print(report: dict[str, Any]) -> None:
    console = Console()
    for drive in report["drives"]:
        console.print(f"writes to {drive['path']}:", markup=False, soft_wrap=True)
        console.print(_curve_table(drive))
        console.print(describe(drive), highlight=False, markup=False, soft_wrap=True)
    table = Table(title="GB/s in the end")
    table.add_column("drive", overflow="fold")
    names = ("read", "write", "mixed")
    for name in names:
        table.add_column(name, justify="right")
    for drive in report["drives"]:
        table.add_row(escape(drive["path"]), *(f"{drive[name] / _GB:.2f}" for name in names))
    console.print(table)
    sums = {name: sum(drive[name] for drive in report["drives"]) / _GB for name in names}
    options = " ".join(f"--drive-{name} {sums[name]:.2f}" for name in names)
    if all(drive["is_kept"] for drive in report["drives"]):
        text = "kept for memascend doctor, and for memascend plan with a --config that names these "
        text += f"paths; elsewhere: memascend plan {options}"
    else:
        text = "not kept, since the cache may be larger; to count with these rates: memascend plan "
        text += options
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _curve_table(drive: dict[str, Any]) -> Table:
    """Return the curve as a table of bars, with neighbouring samples as one row."""
    table = Table()
    for name in ("GB written", "GB/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    curve = drive["curve"]
    top = max(sample["rate"] for sample in curve)
    count = min(_ROWS_MAX, len(curve))
    for row in range(count):
        part = curve[row * len(curve) // count : (row + 1) * len(curve) // count]
        rate = sum(sample["rate"] for sample in part) / len(part)
        bar = ProgressBar(total=top, completed=rate, width=_BAR_WIDTH)
        table.add_row(f"{part[-1]['written_bytes'] / _GB:.1f}", f"{rate / _GB:.2f}", bar)
    return table


def describe(drive: dict[str, Any]) -> str:
    """Return in words where the cache of a drive ends, and whether its rate has settled."""
    written, rate = f"{drive['written_bytes'] / _GB:.1f} GB", f"{drive['write'] / _GB:.2f} GB/s"
    more = "a larger --share writes more"
    if drive["state"] == End.NO_DROP.value:
        return (
            f"the rate stayed at {rate} for all of {written}: the drive has no write cache, or one "
            f"that is larger; {more}"
        )
    text = (
        f"the write cache ends after {drive['cache_bytes'] / _GB:.1f} GB: "
        f"{drive['cache_rate'] / _GB:.2f} GB/s before, {rate} in the end"
    )
    if drive["state"] == End.SETTLED.value:
        return text
    return f"{text}. The rate had not settled after {written}: it may fall further; {more}"


def _plot(report: dict[str, Any], args: argparse.Namespace) -> None:
    series = []
    for index, drive in enumerate(report["drives"]):
        points = [(one["written_bytes"] / _GB, one["rate"] / _GB) for one in drive["curve"]]
        cache = drive["cache_bytes"]
        name = drive["path"] if cache is None else f"{drive['path']}, cache {cache / _GB:.0f} GB"
        series.append(Series(name, points, colour=index))
    chart = line_chart("rate of writes", Quantity("rate", "GB/s"), series, x_title="GB written")
    if chart is None:
        raise AssertionError("a drive without samples is an error before")
    write_picture(chart, args.plot)
