"""A key that is in host memory, as a whole or with its first pages, and the choice of its place.

Knows bytes and runs of a block; neither stores nor which key is worth the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend._core import FreeSpace, TakenRun
from memascend.base.units import PAGE_BYTES, page_down

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class ResidentKey:
    """A key whose head is in memory; a key that is in memory as a whole is not on the drive."""

    stream: str  # the stream whose block it is in
    nbytes: int  # size of the key
    run: TakenRun  # the place of the head in that block
    head: torch.Tensor  # the bytes in memory, as uint8
    is_lent: bool = False  # True while the head is read in place, so that it must not be written

    @property
    def head_bytes(self) -> int:
        """Number of bytes in memory."""
        return self.head.numel()

    @property
    def is_on_drive(self) -> bool:
        """True if a part of it is on the drive."""
        return self.head_bytes < self.nbytes

    def holds(self, dtype: torch.dtype) -> bool:
        """Return whether it is in memory as a whole, aligned for elements of this type."""
        return not self.is_on_drive and self.head.storage_offset() % dtype.itemsize == 0

    def refuse_if_lent(self, name: str) -> None:
        """Raise ValueError while the key's memory is lent, and must not change."""
        if self.is_lent:
            raise ValueError(
                f'"{name}" is lent: a gathered parameter is read in its memory. likely cause: '
                "parameters are changed or moved while they are gathered. fix: leave "
                "GatheredParameters first"
            )

    def count_in_head(self, name: str, offset: int, nbytes: int) -> int:
        """Return how many bytes of a transfer are in memory; raise ValueError if it is outside."""
        if not 0 <= offset <= self.nbytes - nbytes:
            raise ValueError(
                f'bytes {offset} to {offset}+{nbytes} are not all in "{name}", which has '
                f"{self.nbytes}"
            )
        return max(0, min(self.head_bytes - offset, nbytes))


def find_run(
    space: FreeSpace, nbytes: int, besides: TakenRun | None = None
) -> tuple[int, int] | None:
    """Return (begin, bytes) of a free run for the whole key, else of the largest for its head.

    None without a free page. `besides` is a run that counts as free.
    """
    run, count = space.best(nbytes, besides=besides), nbytes
    if run is None and (run := space.largest(besides=besides)) is not None:
        count = page_down(run[1])
    if run is None or count == 0:
        return None
    begin, run_bytes = run
    # Odd sizes go to the ends, so that the rest stays aligned for the drive.
    return (begin if count % PAGE_BYTES == 0 else begin + run_bytes - count), count
