"""The frame of every benchmark: interleaved rounds, percentiles, ratios round by round, JSON rows.

Contenders run in turns and each round starts with the next one (A B C, B C A, ...): a machine that
slows down slows all of them, and nobody always inherits the same caches. Ratios are taken within a
round, their spread over the rounds. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import kernel_counts
from rich.console import Console
from rich.table import Table

from memascend.system.memory import process_status
from memascend.version import __version__

T = TypeVar("T")
#: Columns of a table that goes to a file or a pipe.
FILE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the work. `prepare` runs before each measured run and is not measured."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run took; cpu_s counts all threads of this process, in user and kernel mode."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    """The 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float

    def text(self, digits: int = 2) -> str:
        """Gives "p50 (p20 - p80)"."""
        return f"{self.p50:.{digits}f} ({self.p20:.{digits}f} - {self.p80:.{digits}f})"


@dataclass(slots=True)
class Row:
    """One line of the report: a contender on a case, with all that is needed to read it alone."""

    bench: str
    case: str
    contender: str
    figures: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


def interleave(
    contenders: Sequence[Contender], *, rounds: int, warmups: int = 1
) -> dict[str, list[Sample]]:
    """Runs all contenders in turns and gives each one's samples, in order of the rounds."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for index in range(warmups + rounds):
        for contender in in_turn(contenders, index):
            contender.prepare()
            gc.collect()
            sample = measure(contender.run)
            if index >= warmups:
                samples[contender.name].append(sample)
    return samples


def in_turn(contenders: Sequence[T], index: int) -> Sequence[T]:
    """The order of a round."""
    first = index % len(contenders)
    return (*contenders[first:], *contenders[:first])


def measure(run: Callable[[], object]) -> Sample:
    cpu_start_s = _cpu_s()
    wall_start_s = time.perf_counter()
    run()
    wall_s = time.perf_counter() - wall_start_s
    return Sample(wall_s=wall_s, cpu_s=_cpu_s() - cpu_start_s)


def spread(values: Sequence[float]) -> Spread:
    """Percentiles by linear interpolation; of one value, that value three times."""
    ordered = sorted(values)

    def percentile(fraction: float) -> float:
        place = fraction * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    return Spread(percentile(0.2), percentile(0.5), percentile(0.8))


def speedup(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread:
    """How many times faster ours was than theirs, pair by pair."""
    pairs = zip(ours, theirs, strict=True)
    return spread([their.wall_s / our.wall_s for our, their in pairs])


def cpu_share(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Spread:
    """Our CPU time as a part of theirs, pair by pair."""
    pairs = zip(ours, theirs, strict=True)
    return spread([our.cpu_s / their.cpu_s for our, their in pairs])


def peak_rss_growth(run: Callable[[], object]) -> int:
    """Bytes by which the resident memory of this process rose above its start while `run` ran.

    Counts what the kernel really handed out, whoever asked for it. The least of a few runs, since
    other threads of the process may take memory meanwhile; exact to some pages. Where the kernel
    does not reset its high-water mark the result is an upper limit, as `machine` then states.
    """
    return min(_rss_growth_once(run) for _ in range(3))


def machine(directory: Path | None = None) -> dict[str, Any]:
    """The circumstances of a run: versions, CPU, kernel, and the file system below `directory`."""
    facts: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "cpu": _cpu_model(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if directory is not None:
        facts["filesystem"] = _filesystem(directory)
    if lacks := kernel_counts.lacks():
        facts["lacks"] = lacks
    return facts


def parser(question: str) -> argparse.ArgumentParser:
    """The arguments every benchmark takes."""
    arguments = argparse.ArgumentParser(description=question)
    arguments.add_argument("--small", action="store_true", help="seconds instead of minutes")
    arguments.add_argument("--out", type=Path, help="directory for one JSON file per benchmark")
    arguments.add_argument(
        "--directory", type=Path, default=Path(), help="where files are written (default: here)"
    )
    arguments.add_argument(
        "--without-deepspeed", action="store_true", help="leave out what needs DeepSpeed's own ops"
    )
    return arguments


def collect(rows: Iterable[Row]) -> list[Row]:
    """All rows; each is printed as soon as it is there, for runs that take long."""
    collected = []
    for row in rows:
        collected.append(row)
        print(f"{row.case}, {row.contender}: {row.figures}", flush=True)
    return collected


def report(name: str, title: str, rows: Sequence[Row], out: Path | None) -> None:
    """Prints the figures that are texts or numbers as a table and writes all of it as JSON."""
    table = Table(title=title, title_justify="left")
    shown = list(dict.fromkeys(key for row in rows for key in row.figures))
    for column in ("case", "contender", *shown):
        table.add_column(column, justify="left" if column in ("case", "contender") else "right")
    for index, row in enumerate(rows):
        last_of_case = index + 1 == len(rows) or rows[index + 1].case != row.case
        cells = [_cell(row.figures.get(key)) for key in shown]
        table.add_row(row.case, row.contender, *cells, end_section=last_of_case)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)
    write(name, rows, out)


def write(name: str, rows: Sequence[Row], out: Path | None) -> None:
    """Writes the rows as JSON; nothing without a folder."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(row) for row in rows], indent=1)
        (out / f"{name}.json").write_text(text + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Spread):
        return value.text()
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rss_growth_once(run: Callable[[], object]) -> int:
    gc.collect()
    # What malloc kept of earlier runs would hide what this one needs.
    ctypes.CDLL(None).malloc_trim(0)
    kernel_counts.reset_host_peak()
    before = process_status(os.getpid())["VmRSS"]
    run()
    return max(0, kernel_counts.host_peak_bytes() - before)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _versions() -> Iterator[tuple[str, str]]:
    yield "memascend", __version__
    for package in ("torch", "deepspeed"):
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _filesystem(directory: Path) -> dict[str, str]:
    """The mount that holds `directory`: the longest mount point that is a prefix of its path."""
    path = directory.resolve()
    found = {"type": "unknown", "device": "unknown"}
    longest = -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount_point, kind, *_ = line.split()
        if path.is_relative_to(mount_point) and len(mount_point) >= longest:
            longest = len(mount_point)
            found = {"type": kind, "device": device}
    return found
