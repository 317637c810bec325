"""A window of accumulation on the drive: its sums and waiting gradients, and their traffic.

Pure arithmetic, for one element of a gradient whose sum is not in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from memascend.base.sizes import APPENDED_COUNT_MAX


@dataclass(frozen=True, slots=True)
class WindowBytes:
    """Bytes per element that the micro-steps of one window store and move."""

    steps: int
    arriving_itemsize: int  # bytes of a gradient as it arrives
    sum_itemsize: int  # bytes of the sum

    @property
    def appends(self) -> bool:
        """Whether gradients wait to be added; else each is added as it arrives."""
        return self.steps > 1 and self.arriving_itemsize < self.sum_itemsize

    @property
    def places(self) -> int:
        """Most gradients that wait on the drive."""
        return min(self.steps - 1, APPENDED_COUNT_MAX) if self.appends else 0

    @property
    def sums(self) -> int:
        """Sums on the drive: 2 if a partial sum is stored while the last one is still seen."""
        return 2 if self._sums_before_last else 1

    @property
    def drive_bytes(self) -> int:
        """Most bytes on the drive."""
        return self.sums * self.sum_itemsize + self.places * self.arriving_itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes that backward reads."""
        return self._appended_bytes + self._sums_before_last * self.sum_itemsize

    @property
    def written_bytes(self) -> int:
        """Bytes that backward writes."""
        return self.read_bytes + self.sum_itemsize

    @property
    def _sums_before_last(self) -> int:
        """Sums stored before the last micro-step."""
        every = APPENDED_COUNT_MAX + 1 if self.appends else 1
        return (self.steps - 1) // every

    @property
    def _appended_bytes(self) -> int:
        count = self.steps - 1 - self._sums_before_last
        return count * self.arriving_itemsize
