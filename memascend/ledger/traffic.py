"""Traffic, busy time and request latency of each volume, and the traffic of activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memascend import _core
from memascend.base.units import format_nbytes


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of requests, from their issue to their completion, in seconds.

    Attributes:
        count: Number of requests.
        p50_s: Median; this and the next two are at most a quarter too large.
        p99_s: 99th percentile.
        p999_s: 99.9th percentile.
        longest_s: Maximum.
    """

    count: int
    p50_s: float
    p99_s: float
    p999_s: float
    longest_s: float

    def describe(self) -> str:
        """Return the 99th percentile and the maximum, for the log."""
        return f"99 % within {1e3 * self.p99_s:.3g} ms, longest {1e3 * self.longest_s:.3g} ms"


@dataclass(slots=True)
class ActivationTraffic:
    """Saved activations, since the start.

    Attributes:
        count: Number of storages.
        saved_bytes: Bytes of all of them.
        written_bytes: Bytes written to the drive.
        read_bytes: Bytes read from the drive.
        device_bytes_peak: Peak of their bytes on the device: waiting, prefetched, or in use.
    """

    count: int = 0
    saved_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    device_bytes_peak: int = 0

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
    """One volume of one rank, since the start.

    Attributes:
        path: Its directory or device.
        bytes_read: Bytes that the drive read, in whole blocks.
        bytes_written: Bytes that the drive wrote, in whole blocks.
        busy_s: Seconds with requests in flight.
        reads: Latency of read requests.
        writes: Latency of write requests.
        needed: Latency of the requests that training waited for.
    """

    path: str
    bytes_read: int
    bytes_written: int
    busy_s: float
    reads: Latency
    writes: Latency
    needed: Latency

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


def traffic_of(store: _core.Store) -> list[VolumeTraffic]:
    """Return the traffic of every volume of a store."""
    return [_traffic(volume.path, volume.traffic) for volume in store.volume_stats()]


def _traffic(path: str, found: Mapping[str, Any]) -> VolumeTraffic:
    return VolumeTraffic(
        path=path,
        bytes_read=found["bytes_read"],
        bytes_written=found["bytes_written"],
        busy_s=found["busy_s"],
        reads=Latency(**found["reads"]),
        writes=Latency(**found["writes"]),
        needed=Latency(**found["needed"]),
    )
