"""Bytes of one rank by name: the form in which memascend and stock DeepSpeed are compared.

Pure values; the modules that fill them compute the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memascend.plan.drive_rates import DriveRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one rank, by name; for memascend and for stock."""

    host: Mapping[str, int]  # host memory throughout training, by component
    #: Temporary host memory during start, on top of `host`.
    host_initialization: Mapping[str, int] = field(default_factory=dict)
    host_step: Mapping[str, int] = field(default_factory=dict)  # temporary in a step, beside `host`
    drive: Mapping[str, int]  # bytes stored on the drive, by stream
    read_bytes: Mapping[str, int]  # bytes read from the drive in one optimizer step, by stream
    written_bytes: Mapping[str, int]  # bytes written to it
    #: The part of the read bytes in the forward and backward passes; the optimizer reads the rest.
    passes_read_bytes: int
    passes_written_bytes: int  # the same for written bytes

    @property
    def host_bytes(self) -> int:
        """Host memory throughout training."""
        return sum(self.host.values())

    @property
    def initialization_bytes(self) -> int:
        """Peak host memory during start."""
        return self.host_bytes + sum(self.host_initialization.values())

    @property
    def step_bytes(self) -> int:
        """Peak host memory in a step. The temporaries exist at different moments."""
        return self.host_bytes + max(self.host_step.values(), default=0)

    @property
    def peak_bytes(self) -> int:
        """Peak host memory."""
        return max(self.initialization_bytes, self.step_bytes)

    @property
    def drive_bytes(self) -> int:
        """All bytes on the drive."""
        return sum(self.drive.values())

    def step_seconds(self, rates: DriveRates, *, ranks: int = 1) -> float:
        """Return the drive time of one optimizer step in seconds, without compute.

        `ranks` share the drive. All planned bytes are moved; parameters found in a slot reduce it.
        Reads and writes of a phase are under way at the same time, but passes and optimizer are
        not: the optimizer starts after the last gradient has arrived.
        """
        read_all, written_all = sum(self.read_bytes.values()), sum(self.written_bytes.values())
        passes_s = rates.seconds(self.passes_read_bytes, self.passes_written_bytes)
        optimizer_s = rates.seconds(
            read_all - self.passes_read_bytes, written_all - self.passes_written_bytes
        )
        return ranks * (passes_s + optimizer_s)
