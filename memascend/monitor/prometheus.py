"""The status of a run in Prometheus' text format, for node_exporter's textfile collector.

Base units; each metric has a HELP, a TYPE and labels. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from memascend.ledger.traffic import Latency
from memascend.monitor.runs import RankFile
from memascend.monitor.status import Status

_Samples = Iterator[tuple[dict[str, object], float | None]]


@dataclass(frozen=True, slots=True)
class _Measure:
    """One metric: its name, type, help text, and samples of one rank (None: no sample)."""

    name: str
    kind: str
    text: str
    samples: Callable[[Status], _Samples]


def as_prometheus(ranks: Sequence[RankFile]) -> str:
    """Return the samples of all ranks whose status can be read."""
    known = [(rank.status, not rank.has_ended) for rank in ranks if rank.status is not None]
    lines = []
    for measure in _MEASURES:
        lines += _head(measure.name, measure.kind, measure.text)
        for status, _ in known:
            for labels, value in measure.samples(status):
                if value is not None:
                    lines.append(_line(measure.name, {"rank": status.rank} | labels, value))
    lines += _head("memascend_running", "gauge", "1 while the rank trains, 0 once it has ended.")
    lines += [_line("memascend_running", {"rank": status.rank}, is_on) for status, is_on in known]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: dict[str, object], value: float) -> str:
    written = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
    return f"{name}{{{written}}} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _one(read: Callable[[Status], float | None]) -> Callable[[Status], _Samples]:
    def samples(status: Status) -> _Samples:
        yield {}, read(status)

    return samples


def _of_components(field: str) -> Callable[[Status], _Samples]:
    def samples(status: Status) -> _Samples:
        for row in status.ledger.rows:
            yield {"component": row.component}, getattr(row, field)

    return samples


def _of_volumes(field: str) -> Callable[[Status], _Samples]:
    def samples(status: Status) -> _Samples:
        for volume in status.ledger.volumes:
            yield {"volume": volume.path}, getattr(volume, field)

    return samples


def _phases(status: Status) -> _Samples:
    if status.mean is not None:
        for phase, seconds in asdict(status.mean).items():
            if phase != "waited":
                yield {"phase": phase}, seconds


def _latencies(status: Status) -> _Samples:
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


def _info(status: Status) -> _Samples:
    yield {"run": status.run, "program": status.program, "host": status.process.host}, 1.0


_MEASURES = tuple(
    _Measure(f"memascend_{name}", kind, text, samples)
    for name, kind, text, samples in (
        ("run_info", "gauge", "Always 1; the labels say which run this is.", _info),
        (
            "status_timestamp_seconds",
            "gauge",
            "Time of the rank's last status, in seconds since 1970.",
            _one(lambda status: status.written_at),
        ),
        ("steps_total", "counter", "Optimizer steps so far.", _one(lambda status: status.step)),
        (
            "steps_planned",
            "gauge",
            "Optimizer steps of the learning-rate schedule.",
            _one(lambda status: status.steps_total),
        ),
        (
            "time_left_seconds",
            "gauge",
            "Seconds until the last step of the schedule.",
            _one(lambda status: status.seconds_left),
        ),
        ("step_seconds", "gauge", "Mean time of the last steps, by phase.", _phases),
        (
            "step_waited_seconds",
            "gauge",
            "Mean time of a step in which training waited for the drives.",
            _one(lambda status: status.mean.waited if status.mean is not None else None),
        ),
        (
            "tokens_per_second",
            "gauge",
            "Tokens per second of this rank, padding included.",
            _one(lambda status: status.tokens_per_second),
        ),
        (
            "samples_per_second",
            "gauge",
            "Samples per second of this rank.",
            _one(lambda status: status.samples_per_second),
        ),
        ("host_memory_bytes", "gauge", "Host memory by component.", _of_components("live_bytes")),
        (
            "host_memory_peak_bytes",
            "gauge",
            "Peak host memory by component.",
            _of_components("peak_bytes"),
        ),
        (
            "host_memory_planned_bytes",
            "gauge",
            "Planned host memory by component.",
            _of_components("planned_bytes"),
        ),
        (
            "host_memory_limit_bytes",
            "gauge",
            "Limit on the host memory of all components together.",
            _one(lambda status: status.ledger.limit_bytes),
        ),
        (
            "host_memory_held_bytes",
            "gauge",
            "Host memory that the components hold together.",
            _one(lambda status: status.ledger.held_bytes),
        ),
        (
            "resident_memory_bytes",
            "gauge",
            "Resident memory of the process, Python and torch included.",
            _one(lambda status: status.ledger.resident_bytes),
        ),
        (
            "volume_read_bytes_total",
            "counter",
            "Bytes that this rank read from the volume.",
            _of_volumes("bytes_read"),
        ),
        (
            "volume_written_bytes_total",
            "counter",
            "Bytes that this rank wrote to the volume.",
            _of_volumes("bytes_written"),
        ),
        (
            "volume_busy_seconds_total",
            "counter",
            "Time with requests of this rank in flight.",
            _of_volumes("busy_s"),
        ),
        (
            "volume_latency_seconds",
            "gauge",
            "Latency of requests since the start; quantile 1 is the longest.",
            _latencies,
        ),
        (
            "waited_seconds_total",
            "counter",
            "Time that training waited for the drives.",
            _one(lambda status: status.ledger.drive.get("wait_seconds")),
        ),
        (
            "endurance_used_ratio",
            "gauge",
            "Part of the drives' stated endurance that the ranks of this machine have used.",
            _one(
                lambda status: (
                    status.ledger.wear.endurance_share if status.ledger.wear is not None else None
                )
            ),
        ),
    )
)
