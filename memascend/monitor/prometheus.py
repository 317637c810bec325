"""The status of a run in Prometheus' text format, for node_exporter's textfile collector.

Base units; each metric has a HELP, a TYPE and labels. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from memascend.ledger.traffic import Latency
from memascend.monitor.runs import RankFile
from memascend.monitor.status import Status

#: Yields labels and values of one rank; a value of None is no sample.
_Samples = Callable[[Status], Iterator[tuple[dict[str, object], float | None]]]


def as_prometheus(ranks: Sequence[RankFile]) -> str:
    """Return the samples of all ranks whose status can be read."""
    known = [(rank.status, not rank.has_ended) for rank in ranks if rank.status is not None]
    lines = []
    for name, (text, samples) in _MEASURES.items():
        lines += _head(name, text)
        for status, _ in known:
            for labels, value in samples(status):
                if value is not None:
                    lines.append(_line(name, {"rank": status.rank} | labels, value))
    lines += _head("running", "1 while the rank trains, 0 once it has ended.")
    lines += [_line("running", {"rank": status.rank}, is_on) for status, is_on in known]
    return "\n".join(lines) + "\n"


def _head(name: str, text: str) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    return [f"# HELP memascend_{name} {text}", f"# TYPE memascend_{name} {kind}"]


def _line(name: str, labels: dict[str, object], value: float) -> str:
    written = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
    return f"memascend_{name}{{{written}}} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _one(path: str) -> _Samples:
    """Return the samples of a value of the status by its dotted name; None below a None."""

    def samples(status: Status) -> Iterator[tuple[dict[str, object], float | None]]:
        value: Any = status
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        yield {}, value

    return samples


def _of_components(field: str) -> _Samples:
    return lambda status: (
        ({"component": row.component}, getattr(row, field)) for row in status.ledger.rows
    )


def _of_volumes(field: str) -> _Samples:
    return lambda status: (
        ({"volume": volume.path}, getattr(volume, field)) for volume in status.ledger.volumes
    )


def _info(status: Status) -> Iterator[tuple[dict[str, object], float]]:
    yield {"run": status.run, "program": status.program, "host": status.process.host}, 1.0


def _phases(status: Status) -> Iterator[tuple[dict[str, object], float]]:
    if status.mean is not None:
        for phase, seconds in asdict(status.mean).items():
            if phase != "waited":
                yield {"phase": phase}, seconds


def _latencies(status: Status) -> Iterator[tuple[dict[str, object], float]]:
    for volume in status.ledger.volumes:
        for operation, latency in (("read", volume.reads), ("write", volume.writes)):
            for quantile, seconds in _quantiles(latency):
                counted_by: dict[str, object] = {"volume": volume.path, "operation": operation}
                yield counted_by | {"quantile": quantile}, seconds


def _quantiles(latency: Latency) -> list[tuple[str, float]]:
    if not latency.count:
        return []
    found = (latency.p50_s, latency.p99_s, latency.p999_s, latency.longest_s)
    return list(zip(("0.5", "0.99", "0.999", "1"), found, strict=True))


def _waited(status: Status) -> Iterator[tuple[dict[str, object], float | None]]:
    yield {}, status.ledger.drive.get("wait_seconds")


#: Help text and samples by name, without "memascend_". "_total" ends the names of counters.
_MEASURES: dict[str, tuple[str, _Samples]] = {
    "run_info": ("Always 1; the labels say which run this is.", _info),
    "status_timestamp_seconds": (
        "Time of the rank's last status, in seconds since 1970.",
        _one("written_at"),
    ),
    "steps_total": ("Optimizer steps so far.", _one("step")),
    "steps_planned": ("Optimizer steps of the learning-rate schedule.", _one("steps_total")),
    "time_left_seconds": ("Seconds until the last step of the schedule.", _one("seconds_left")),
    "step_seconds": ("Mean time of the last steps, by phase.", _phases),
    "step_waited_seconds": (
        "Mean time of a step in which training waited for the drives.",
        _one("mean.waited"),
    ),
    "tokens_per_second": (
        "Tokens per second of this rank, padding included.",
        _one("tokens_per_second"),
    ),
    "samples_per_second": ("Samples per second of this rank.", _one("samples_per_second")),
    "host_memory_bytes": ("Host memory by component.", _of_components("live_bytes")),
    "host_memory_peak_bytes": ("Peak host memory by component.", _of_components("peak_bytes")),
    "host_memory_planned_bytes": (
        "Planned host memory by component.",
        _of_components("planned_bytes"),
    ),
    "host_memory_limit_bytes": (
        "Limit on the host memory of all components together.",
        _one("ledger.limit_bytes"),
    ),
    "host_memory_held_bytes": (
        "Host memory that the components hold together.",
        _one("ledger.held_bytes"),
    ),
    "resident_memory_bytes": (
        "Resident memory of the process, Python and torch included.",
        _one("ledger.resident_bytes"),
    ),
    "volume_read_bytes_total": (
        "Bytes that this rank read from the volume.",
        _of_volumes("bytes_read"),
    ),
    "volume_written_bytes_total": (
        "Bytes that this rank wrote to the volume.",
        _of_volumes("bytes_written"),
    ),
    "volume_busy_seconds_total": (
        "Time with requests of this rank in flight.",
        _of_volumes("busy_s"),
    ),
    "volume_latency_seconds": (
        "Latency of requests since the start; quantile 1 is the longest.",
        _latencies,
    ),
    "waited_seconds_total": ("Time that training waited for the drives.", _waited),
    "endurance_used_ratio": (
        "Part of the drives' stated endurance that the ranks of this machine have used.",
        _one("ledger.wear.endurance_share"),
    ),
}
