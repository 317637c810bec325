"""The rates of a drive under training, and the time that reads and writes take at them.

A step writes more than a consumer drive's write cache holds, so the rate that counts is the one
after that cache is full. Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memascend.errors import ConfigError

#: Rates of a modest consumer drive with its cache full; docs/memory.md has the reasons.
READ_GB_S, WRITE_GB_S = 3.0, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """Sustained rates of one drive, or of all drives of a machine, in 10^9 bytes per second."""

    read_gb_s: float = READ_GB_S  # reads alone
    write_gb_s: float = WRITE_GB_S  # writes alone
    #: Reads and writes at the same time, as many bytes of each, both counted. None: what it is for
    #: a drive on which they take turns.
    mixed_gb_s: float | None = None

    def __post_init__(self) -> None:
        """Check the rates.

        Raises:
            ConfigError: A rate is not a number above 0.
        """
        stated = [self.read_gb_s, self.write_gb_s]
        stated += [] if self.mixed_gb_s is None else [self.mixed_gb_s]
        if not all(0 < rate < math.inf for rate in stated):
            rates = ", ".join(map(str, stated))
            raise ConfigError(f"rates of a drive must be above 0 GB/s, got {rates}")

    @property
    def both_gb_s(self) -> float:
        """The rate of reads and writes at the same time, `mixed_gb_s` or the one of turns."""
        if self.mixed_gb_s is not None:
            return self.mixed_gb_s
        return 2 / (1 / self.read_gb_s + 1 / self.write_gb_s)

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the seconds in which a drive reads and writes these bytes, in any order.

        The time is the longest of three: of the reads alone, of the writes alone, and of both
        together. Together as much as goes both ways moves at the mixed rate, and the rest at the
        rate of its own direction.
        """
        read_s = read_bytes / self.read_gb_s
        written_s = written_bytes / self.write_gb_s
        both_bytes = min(read_bytes, written_bytes)
        together_s = (
            2 * both_bytes / self.both_gb_s
            + (read_bytes - both_bytes) / self.read_gb_s
            + (written_bytes - both_bytes) / self.write_gb_s
        )
        return max(read_s, written_s, together_s) / 1e9
