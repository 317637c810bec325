"""How far parameters are prefetched: the bytes of shards that may be read before they are needed.

The stream prefetches in DeepSpeed's order up to this limit, and never more than half its budget
(`ParameterStream.share_bytes`). DeepSpeed asks for as many shards as it likes
(deepspeed/parameters/swapper.py).
"""

from __future__ import annotations

from collections import Counter

from memascend.base.sizes import PREFETCH_BYTES_MIN, REPEATED_COUNT_MIN


class PrefetchLimit:
    """The limit of one stream, which follows from the sizes of its shards unless it is stated."""

    def __init__(self, given_bytes: int | None = None, drive_count: int = 1) -> None:
        """Start without shards.

        Args:
            given_bytes: The limit, if `buffer_pool.prefetch_bytes` states one.
            drive_count: Drives whose queues it keeps full; the plan changes it.
        """
        self._given_bytes, self.drive_count = given_bytes, drive_count
        self._sizes: Counter[int] = Counter()  # number of shards by bytes

    def note_made(self, nbytes: int) -> None:
        """Count a new shard."""
        self._sizes[nbytes] += 1

    def note_recast(self, old_bytes: int, new_bytes: int) -> None:
        """Count a shard with its new size instead of the old one."""
        self._sizes[old_bytes] -= 1
        self._sizes[new_bytes] += 1

    @property
    def repeated_bytes_max(self) -> int:
        """Largest size that occurs often: of the layers' shards, not of the embedding."""
        counts = self._sizes.items()
        repeated = [nbytes for nbytes, count in counts if count >= REPEATED_COUNT_MIN]
        return max(repeated, default=0)

    @property
    def nbytes(self) -> int:
        """The stated bytes, else twice `repeated_bytes_max`, and the least for each drive."""
        if self._given_bytes is not None:
            return self._given_bytes
        return max(self.drive_count * PREFETCH_BYTES_MIN, 2 * self.repeated_bytes_max)
