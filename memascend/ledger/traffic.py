"""Traffic, busy time and request latency of each volume, and the traffic of activations."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from memascend import _core
from memascend.base.units import format_nbytes


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of requests, from their issue to their completion, in seconds."""

    count: int  # number of requests
    p50_s: float  # median; this and the next two are at most a quarter too large
    p99_s: float
    p999_s: float
    longest_s: float

    def describe(self) -> str:
        """Return the 99th percentile and the maximum, for the log."""
        return f"99 % within {1e3 * self.p99_s:.3g} ms, longest {1e3 * self.longest_s:.3g} ms"


@dataclass(slots=True)
class ActivationTraffic:
    """Saved activations, since the start."""

    count: int = 0  # number of storages
    saved_bytes: int = 0  # bytes of all of them
    written_bytes: int = 0  # bytes written to the drive
    read_bytes: int = 0  # bytes read from the drive
    device_bytes_peak: int = 0  # peak of their bytes on the device: waiting, prefetched, or in use

    def describe(self) -> str:
        """Return one line for the log."""
        return (
            f"activations: {format_nbytes(self.saved_bytes)} saved for backward, "
            f"{format_nbytes(self.written_bytes)} of it written to the drives and "
            f"{format_nbytes(self.read_bytes)} read; at most "
            f"{format_nbytes(self.device_bytes_peak)} were on the device"
        )


@dataclass(frozen=True, slots=True)
class VolumeTraffic:
    """One volume of one rank, since the start."""

    path: str  # its directory or device
    bytes_read: int  # bytes that the drive read, in whole blocks
    bytes_written: int  # bytes that the drive wrote, in whole blocks
    busy_s: float  # seconds with requests in flight
    reads: Latency  # latency of read requests
    writes: Latency  # latency of write requests
    needed: Latency  # latency of the requests that training waited for

    def describe(self) -> str:
        """Return one line for the log."""
        parts = [f"{self.path}: busy for {self.busy_s:.1f} s"]
        for what, nbytes, latency in (
            ("read", self.bytes_read, self.reads),
            ("written", self.bytes_written, self.writes),
        ):
            if latency.count:
                parts.append(f"{what} {format_nbytes(nbytes)} ({latency.describe()})")
        return "; ".join(parts)


_ADAPTER = TypeAdapter(list[VolumeTraffic])


def traffic_of(store: _core.Store) -> list[VolumeTraffic]:
    """Return the traffic of every volume of a store."""
    found = [{"path": volume.path} | volume.traffic for volume in store.volume_stats()]
    return _ADAPTER.validate_python(found)
