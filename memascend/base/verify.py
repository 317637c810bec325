"""Verification: what the drives give back is compared with checksums of what was written to them.

The checksums are kept by csrc/nvme/space/checksums.hpp; here are their numbers and the words about
them, for whoever checks, plans or reports. Imports nothing.
"""

from __future__ import annotations

import os

#: What one checksum stands for, and with verification the block of every transfer.
GRAIN_BYTES = 64 << 10
CHECKSUM_BYTES = 4
#: Checksums of so much of a volume lie in one page.
PAGE_SPAN_BYTES = 64 << 20
PAGE_BYTES = PAGE_SPAN_BYTES // GRAIN_BYTES * CHECKSUM_BYTES
#: Memory for them is taken in multiples of this.
SLAB_BYTES = 64 << 10


def grain_up(nbytes: int) -> int:
    """The next multiple of a grain."""
    return -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES


def describe_recovery(folder: str | None) -> str:
    """What to do once data on a drive turned out to be wrong.

    Args:
        folder: Of the last complete checkpoint; None while there is none.
    """
    if folder is None:
        return (
            "then start the run again: no checkpoint is at hand, since this run has neither saved "
            "nor loaded one"
        )
    parent, tag = os.path.split(folder)
    return (
        f"then resume from the last complete checkpoint, {folder}: start the run again with "
        f"engine.load_checkpoint({parent!r}, tag={tag!r}), or with resume_from_checkpoint where a "
        "trainer saved it"
    )
