"""`memascend monitor`: status of a running job, live in the terminal or as a file for Prometheus.

Only reads the files that the ranks write; a run does not notice it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memascend.base.units import format_nbytes
from memascend.errors import ConfigError
from memascend.ledger.ledger import LedgerRow
from memascend.ledger.trace import PHASES
from memascend.ledger.traffic import Latency, VolumeTraffic
from memascend.monitor.prometheus import as_prometheus
from memascend.monitor.runs import RankFile, find_run, ranks_of
from memascend.monitor.status import Status, VolumeRate
from memascend.system.files import is_replaceable, replace_whole

#: Seconds between two updates.
INTERVAL_S = 1.0
#: A rank that has not written its status for this long is in a long phase, or hangs.
SILENT_S = 10.0

EPILOG = """\
examples:
  memascend monitor                            your latest run on this machine
  memascend monitor --once                     print once, also without a terminal
  memascend monitor /scratch/runs              the latest of a folder: "status" in the block
  memascend monitor --prometheus /var/lib/node_exporter/memascend.prom

Ends with the run. Without a terminal it prints once; with --prometheus it continues and prints
nothing. Exit status: 0, or 1 if there is no run or a rank died."""


def monitor_command_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "monitor",
        help="watch a running job",
        description="Watch a running job: memory, drives, the parts of a step's time, time left, "
        "wear.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="RUN",
        help="name or folder of a run, or a folder of runs (default: the latest that runs)",
    )
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument(
        "--prometheus",
        type=Path,
        metavar="PATH",
        help="write this file (*.prom) for node_exporter's textfile collector",
    )
    parser.set_defaults(run=monitor_command)


def monitor_command(args: argparse.Namespace, console: Console | None = None) -> int:
    """Show a run until it ends, and return the exit status."""
    console = console or Console()
    if args.prometheus is not None:
        _check_prometheus(args.prometheus)
    run = find_run(args.name)
    is_live = console.is_terminal and not args.once
    goes_on = is_live or (args.prometheus is not None and not args.once)

    def look() -> list[RankFile]:
        ranks = ranks_of(run)
        if args.prometheus is not None:
            _write_prometheus(args.prometheus, ranks)
        return ranks

    ranks = look()
    if goes_on:
        ranks = _watch(run, look, console if is_live else None)
    elif ranks:
        console.print(view(ranks))
    has_died = [r.has_ended and r.status and not r.status.is_finished for r in ranks]
    return 1 if any(has_died) else 0


def _watch(
    run: Path, look: Callable[[], list[RankFile]], console: Console | None
) -> list[RankFile]:
    """Update the view until every rank has ended; return the last status."""
    seen = look()
    shown = Live(view(seen), console=console or Console(quiet=True), auto_refresh=False)
    with shown:
        while not all(rank.has_ended for rank in seen):
            time.sleep(INTERVAL_S)
            found = look()
            if not found:
                raise ConfigError(f"the run is gone: {run} was removed")
            seen = found
            shown.update(view(seen), refresh=True)
    return seen


def _check_prometheus(path: Path) -> None:
    if path.suffix != ".prom":
        raise ConfigError(f"--prometheus {path}: the collector reads only files named *.prom")
    if not path.parent.is_dir() or not is_replaceable(path):
        raise ConfigError(
            f"--prometheus {path}: {path.parent.absolute()} is no folder, or a folder, link or "
            "device has that name"
        )


def _write_prometheus(path: Path, ranks: Sequence[RankFile]) -> None:
    try:
        replace_whole(path, as_prometheus(ranks))
    except OSError as error:
        raise ConfigError(f"cannot write --prometheus {path}: {error.strerror}") from error


# -- the view ------------------------------------------------------------------------------------


def view(ranks: Sequence[RankFile], now: float | None = None) -> RenderableType:
    """Return the view of a run with at least one rank; `now` is in seconds since 1970."""
    now = time.time() if now is None else now
    known = [rank.status for rank in ranks if rank.status is not None]
    parts: list[RenderableType] = []
    if known:
        parts += [_title(known), *_summary(known)]
    parts += [Text(), _ranks(ranks, now)]
    if any(status.ledger.volumes for status in known):
        parts += [Text(), _volumes(known)]
    if any(status.ledger.rows for status in known):
        parts += [Text(), _components(known)]
    parts += [Text(_printable(rank.problem)) for rank in ranks if rank.problem]
    return Group(*parts)


def _title(known: Sequence[Status]) -> Text:
    first = known[0]
    step = f"step {max(status.step for status in known)}"
    if first.steps_total is not None:
        step += f" of {first.steps_total}"
    count = f"{first.world_size} rank{'s' if first.world_size > 1 else ''}"
    if len(known) < first.world_size:
        count += f", {len(known)} of them here"
    title = Text(_printable(first.program), style="bold")
    return title.append(f"  {step}  {count}  run {_printable(first.run)}", style="not bold")


def _summary(known: Sequence[Status]) -> list[Text]:
    """Return lines on speed, the parts of a step, and wear."""
    means = (status.mean for status in known if status.mean)
    slowest = max(means, key=lambda mean: mean.total, default=None)
    lines = []
    if slowest is not None:
        parts = [f"{_seconds(slowest.total)} a step"]
        for total, unit in (
            (sum(status.tokens_per_second or 0 for status in known), "tokens/s"),
            (sum(status.samples_per_second or 0 for status in known), "samples/s"),
        ):
            if total:
                parts.append(f"{total:,.{0 if total >= 100 else 2}f} {unit}")
        left = max((status.seconds_left or 0 for status in known), default=0)
        if left:
            parts.append(f"{_seconds(left)} left")
        lines.append(Text(", ".join(parts)))
        shares = ", ".join(
            f"{phase} {100 * getattr(slowest, phase) / max(slowest.total, 1e-9):.0f} %"
            for phase in PHASES
        )
        lines.append(Text(shares))
        lines.append(Text(f"training waited {_seconds(slowest.waited)} of a step for the drives"))
    wear = known[0].ledger.wear
    if wear is not None and wear.written_bytes:
        lines.append(Text(wear.describe()))
    return lines


def _ranks(ranks: Sequence[RankFile], now: float) -> Table:
    table = _table("rank", "state", "step", "memascend", "limit", "process", "waited")
    for rank in ranks:
        if rank.status is None:
            table.add_row(rank.path.stem.partition("-")[2], "unreadable")
            continue
        status = rank.status
        limit = status.ledger.limit_bytes
        table.add_row(
            str(status.rank),
            _state(rank, now),
            str(status.step),
            format_nbytes(status.ledger.held_bytes),
            "none" if limit is None else format_nbytes(limit),
            format_nbytes(status.ledger.resident_bytes),
            _seconds(status.mean.waited) if status.mean is not None else "-",
        )
    return table


def _state(rank: RankFile, now: float) -> Text:
    status = rank.status
    assert status is not None
    if status.is_finished:
        return Text("finished", style="green")
    if rank.is_alive is False:
        return Text(f"died in {_printable(status.phase)}", style="bold red")
    silent = max(0.0, now - status.written_at)
    text = f"{_printable(status.phase)} {_seconds(status.phase_seconds + silent)}"
    if rank.is_alive is None and silent > SILENT_S:
        return Text(f"{text}, silent", style="yellow")
    return Text(text)


def _volumes(known: Sequence[Status]) -> Table:
    """Return a table of traffic and latency by volume, all ranks together."""
    table = _table("drive", "read", "written", "busy", "p99 read", "p99 write", "longest")
    traffic: dict[str, list[VolumeTraffic]] = {}
    rates: dict[str, list[VolumeRate]] = {}
    for status in known:
        for volume in status.ledger.volumes:
            traffic.setdefault(volume.path, []).append(volume)
        for rate in status.rates:
            rates.setdefault(rate.path, []).append(rate)
    for path, volumes in traffic.items():
        now = rates.get(path, [])
        reads = [volume.reads for volume in volumes]
        writes = [volume.writes for volume in volumes]
        table.add_row(
            Text(_printable(path)),
            f"{sum(rate.read for rate in now) / 1e9:.2f} GB/s",
            f"{sum(rate.written for rate in now) / 1e9:.2f} GB/s",
            f"{100 * max((rate.busy for rate in now), default=0):.0f} %",
            _slowest(reads, lambda latency: latency.p99_s),
            _slowest(writes, lambda latency: latency.p99_s),
            _slowest([*reads, *writes], lambda latency: latency.longest_s),
        )
    return table


def _slowest(latencies: Iterable[Latency], read: Callable[[Latency], float]) -> str:
    found = max((read(latency) for latency in latencies if latency.count), default=None)
    return "-" if found is None else f"{1e3 * found:.3g} ms"


def _components(known: Sequence[Status]) -> Table:
    """Return a table of host memory by component, each the maximum over ranks."""
    table = _table("component", "planned", "now", "peak")
    rows: dict[str, list[LedgerRow]] = {}
    for status in known:
        for row in status.ledger.rows:
            rows.setdefault(row.component, []).append(row)
    for component, found in rows.items():
        planned = max((row.planned_bytes for row in found if row.planned_bytes), default=None)
        table.add_row(
            Text(_printable(component)),
            "-" if planned is None else format_nbytes(planned),
            format_nbytes(max(row.live_bytes for row in found)),
            format_nbytes(max(row.peak_bytes for row in found)),
        )
    return table


def _table(first: str, *others: str) -> Table:
    """Return a table whose first column wraps if the terminal is narrow."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", highlight=False)
    table.add_column(first, overflow="fold", min_width=4)
    for title in others:
        left = title == "state"
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    return table


def _seconds(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, left = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _printable(text: str) -> str:
    """Return text of a file that is not trusted, with control characters replaced."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
