"""`memascend volume bench`: the rate of each drive, alone and beside the others, and its settings.

Measures through `volume_speed`, the load that training puts on a drive.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import platform
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memascend import _core
from memascend.base.progress import Meter, byte_progress
from memascend.base.units import KIB, MIB, format_nbytes
from memascend.cli.volume import fio as volume_fio
from memascend.config.block import DirectNvmeConfig
from memascend.config.environment import cache_directory
from memascend.config.volumes import VolumeConfig
from memascend.errors import StoreError
from memascend.version import __version__
from memascend.volumes.directory import existing_volume
from memascend.volumes.kept import SHORT_RATES_FILE, KeptRates, identity, keep_rates
from memascend.volumes.prepare import check_apart, claimed_device
from memascend.volumes.speed import Bench, Load, Mode
from memascend.volumes.weights import weights_of

MODES: tuple[Mode, ...] = ("read", "write", "mixed")
CHUNKS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
DEPTHS = (8, 16, 32, 64)
#: The last word of a run without --sustained.
SHORT = (
    "this run wrote {:.1f} GB to each drive, by turns with reads. The write cache of a consumer "
    "drive may be larger: past it the rate may be far lower, and training gets there. --sustained "
    "measures it"
)
#: A setting this close to the best is as good; the smallest such is chosen, for it waits least.
GOOD_ENOUGH = 0.97


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the sweep."""

    chunk_bytes: int  # bytes of one request
    queue_depth: int  # requests in flight on each drive
    rate: float  # bytes per second of all drives together, mixed


def volume_bench_command(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    with opened_volumes(args.paths) as volumes:
        report = measure(volumes, args)
    for drive in report["drives"]:
        found = KeptRates(*(drive[mode] / 1e9 for mode in MODES))
        keep_rates(drive["path"], found, cache=cache_directory(), name=SHORT_RATES_FILE)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0


@contextlib.contextmanager
def opened_volumes(paths: Sequence[Path]) -> Iterator[list[_core.VolumeOptions]]:
    """Check folders and raw volumes for use, and claim the latter while the context lasts."""
    with contextlib.ExitStack() as claims:
        named = [_volume(str(path)) for path in paths]
        check_apart(named)
        yield [
            claims.enter_context(claimed_device(volume)) if volume.raw else existing_volume(volume)
            for volume in named
        ]


def _volume(path: str) -> VolumeConfig:
    is_device = os.path.exists(path) and stat.S_ISBLK(os.stat(path).st_mode)
    return VolumeConfig(path=path, raw=is_device)


def measure(volumes: Sequence[_core.VolumeOptions], args: argparse.Namespace) -> dict[str, Any]:
    """Return everything that is measured, by name."""
    fio = None if args.no_fio else volume_fio.find()
    # On stderr, so that --json stays clean.
    with byte_progress("measuring", None, leads=True) as meter:
        bencher = _Bencher(volumes, args, meter, has_fio=fio is not None)
        samples = bencher.sweep()
        chosen = choose(samples)
        load = bencher.load(chosen.chunk_bytes, chosen.queue_depth)
        drives = []
        for volume in volumes:
            [rates], engine = bencher.rates([volume], load, volume.path)
            drive: dict[str, Any] = {"path": volume.path, "drive": identity(volume.path), **rates}
            if fio is not None:
                drive["fio"] = bencher.fio(fio, volume, load, engine)
            drives.append(drive)
        together: list[dict[str, Any]] = []
        if len(volumes) > 1:
            together, _ = bencher.rates(volumes, load, "all together")
        for drive in drives:
            drive["written_bytes"] = bencher.written_bytes[drive["path"]]
    report: dict[str, Any] = {
        "version": __version__,
        "kernel": platform.release(),
        "engine": engine,
        "chosen": {"chunk_bytes": chosen.chunk_bytes, "queue_depth": chosen.queue_depth},
        "sweep": [dataclasses.asdict(sample) for sample in samples],
        "drives": drives,
        "together": together,
        "fio": "not asked" if args.no_fio else fio or "not installed",
    }
    if together:
        report["weights"] = weights_of([rates["mixed"] for rates in together])
    return report


def choose(samples: Sequence[Setting]) -> Setting:
    """Return the setting with the least in flight among those about as fast as the fastest."""
    best = max(sample.rate for sample in samples)
    good = [sample for sample in samples if sample.rate >= best * GOOD_ENOUGH]
    return min(good, key=lambda sample: (sample.chunk_bytes * sample.queue_depth, -sample.rate))


class _Bencher:
    """The measurements of a command, with the number of the current one beside the progress."""

    def __init__(
        self,
        volumes: Sequence[_core.VolumeOptions],
        args: argparse.Namespace,
        meter: Meter,
        *,
        has_fio: bool,
    ) -> None:
        self._volumes, self._args, self._meter = volumes, args, meter
        self._chunks, self._depths = args.chunk or list(CHUNKS), args.depth or list(DEPTHS)
        each = len(volumes) * (1 + has_fio) + (len(volumes) > 1)
        self._count = len(self._chunks) * len(self._depths) + len(MODES) * each
        self._number = 0
        #: Bytes written so far, by path.
        self.written_bytes = dict.fromkeys((volume.path for volume in volumes), 0)

    def load(self, chunk_bytes: int, queue_depth: int) -> Load:
        return Load(chunk_bytes, queue_depth, engine=self._args.engine, span_bytes=self._args.span)

    def sweep(self) -> list[Setting]:
        """Measure the mixed speed of all drives together with every setting."""
        samples = []
        for chunk_bytes, queue_depth in itertools.product(self._chunks, self._depths):
            self._begin(f"sweep: {format_nbytes(chunk_bytes)} x {queue_depth}")
            with Bench(self._volumes, self.load(chunk_bytes, queue_depth), self._meter) as bench:
                rates = bench.run("mixed", self._args.seconds)
                self._count_writes(self._volumes, bench)
            samples.append(Setting(chunk_bytes, queue_depth, sum(rates)))
        return samples

    def rates(
        self, volumes: Sequence[_core.VolumeOptions], load: Load, name: str
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the bytes per second of each drive by mode, and latencies; and the engine.

        All drives are measured at the same time.
        """
        found: list[dict[str, Any]] = [{} for _ in volumes]
        with Bench(volumes, load, self._meter) as bench:
            for mode in MODES:
                self._begin(f"{name}: {mode}")
                for rates, rate in zip(found, bench.run(mode, self._args.seconds), strict=True):
                    rates[mode] = rate
            self._count_writes(volumes, bench)
            for rates, traffic in zip(found, bench.traffic(), strict=True):
                rates["latency"] = {kind: traffic[kind] for kind in ("reads", "writes")}
            return found, bench.engine

    def fio(
        self, program: str, volume: _core.VolumeOptions, load: Load, engine: str
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seconds = self._args.seconds
        for mode in MODES:
            self._begin(f"{volume.path}: fio {mode}")
            try:
                found[mode] = volume_fio.run(
                    program, volume, mode=mode, load=load, engine=engine, seconds=seconds
                )
            except StoreError as error:
                found["error"] = str(error)
        return found

    def _count_writes(self, volumes: Sequence[_core.VolumeOptions], bench: Bench) -> None:
        for volume, traffic in zip(volumes, bench.traffic(), strict=True):
            self.written_bytes[volume.path] += traffic["bytes_written"]

    def _begin(self, name: str) -> None:
        self._number += 1
        self._meter.describe(f"{self._number}/{self._count} {name}")


def _print(report: dict[str, Any]) -> None:
    console = Console()
    chosen = report["chosen"]
    _print_sweep(console, report)
    setting = f"{format_nbytes(chosen['chunk_bytes'])} x {chosen['queue_depth']}"
    table = Table(title=f"GB/s, {setting}, engine {report['engine']}")
    table.add_column("drive", overflow="fold")
    for mode in MODES:
        table.add_column(mode, justify="right")
    table.add_column("p99 ms of all reads / writes", justify="right")
    for drive in report["drives"]:
        table.add_row(
            escape(drive["path"]), *(_rate(drive[mode]) for mode in MODES), _latency(drive)
        )
        if "fio" in drive:
            values = (drive["fio"].get(mode) for mode in MODES)
            table.add_row("  fio, the same size and depth", *map(_rate, values))
    if report["together"]:
        for drive, rates in zip(report["drives"], report["together"], strict=True):
            cells = (*(_rate(rates[mode]) for mode in MODES), _latency(rates))
            table.add_row(f"{escape(drive['path'])}, beside the others", *cells)
        totals = (sum(rates[mode] for rates in report["together"]) for mode in MODES)
        table.add_row("all together", *map(_rate, totals))
    console.print(table)
    for drive in report["drives"]:
        if "error" in drive.get("fio", {}):
            console.print(drive["fio"]["error"], markup=False, style="yellow", soft_wrap=True)
    if report["fio"] == "not installed":
        console.print("fio is not installed: no comparison (apt-get install fio)")
    written = max(drive["written_bytes"] for drive in report["drives"])
    console.print(SHORT.format(written / 1e9), highlight=False, markup=False, soft_wrap=True)
    block = _block(report)
    if block:
        text = f'"memascend": {json.dumps(block)}'
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _block(report: dict[str, Any]) -> dict[str, Any]:
    """Return the memascend block to use, without keys that have their default."""
    block: dict[str, Any] = {}
    defaults = DirectNvmeConfig()
    chosen = report["chosen"]
    if any(chosen[name] != getattr(defaults, name) for name in chosen):
        block["direct_nvme"] = chosen
    if "weights" in report:
        block["volumes"] = [
            {"path": drive["path"], "weight": weight}
            for drive, weight in zip(report["drives"], report["weights"], strict=True)
        ]
    return block


def _print_sweep(console: Console, report: dict[str, Any]) -> None:
    samples = [Setting(**sample) for sample in report["sweep"]]
    depths = sorted({sample.queue_depth for sample in samples})
    table = Table(title="GB/s of all drives together, mixed: request size by depth")
    table.add_column("size")
    for depth in depths:
        table.add_column(str(depth), justify="right")
    chosen = (report["chosen"]["chunk_bytes"], report["chosen"]["queue_depth"])
    for chunk_bytes in sorted({sample.chunk_bytes for sample in samples}):
        rates = {s.queue_depth: s.rate for s in samples if s.chunk_bytes == chunk_bytes}
        cells = [
            f"[bold]{_rate(rates[d])}[/bold]" if (chunk_bytes, d) == chosen else _rate(rates[d])
            for d in depths
        ]
        table.add_row(format_nbytes(chunk_bytes), *cells)
    console.print(table)


def _latency(rates: dict[str, Any]) -> str:
    return " / ".join(
        f"{1e3 * rates['latency'][kind]['p99_s']:.3g}" for kind in ("reads", "writes")
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"
