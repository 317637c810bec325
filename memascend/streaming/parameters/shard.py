"""Records of a stream's shards: key, size, and location besides the store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from memascend.base.interfaces import Ticket
from memascend.base.sizes import PREFETCH_BYTES_MIN, REPEATED_COUNT_MIN
from memascend.memory.pool import Lease


class ShardState(Enum):
    """Location of a shard's contents, besides the store."""

    ABSENT = "nowhere"
    READING = "on their way here, or waiting to be needed"
    STAGED = "in the tensor"
    KEPT = "still in the slot of a shard that was let go"


@dataclass(slots=True, eq=False)
class Shard:
    """One shard: its key and size in the store, and its location.

    Attributes:
        key: Its name in the store.
        numel: Number of elements.
        dtype: Their dtype.
        owner: The object that it is a part of; used by the stream's caller only.
        state: Location of its contents. All attributes below are reset by `leave`.
        lease: The lease of its slot; None when it has no slot (in device memory, lent, or absent).
        tensor: Its contents; None while a shard without a slot is not needed yet.
        read: Its transfer from the drive while that is in flight.
        is_ahead: Whether it was read ahead and is not needed yet.
        is_late: Whether its read waits until the optimizer has written it.
        equals_store: Whether it was read and not handed out to be changed.
        is_lent: Whether the tensor is the store's own memory, to be read and never written.
    """

    key: str
    numel: int
    dtype: torch.dtype
    owner: Any = None
    state: ShardState = ShardState.ABSENT
    lease: Lease | None = None
    tensor: torch.Tensor | None = None
    read: Ticket | None = None
    is_ahead: bool = False
    is_late: bool = False
    equals_store: bool = False
    is_lent: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.dtype.itemsize

    @property
    def is_staged(self) -> bool:
        """True from the request until the shard is let go; its read may be in flight."""
        return self.state in (ShardState.READING, ShardState.STAGED)

    @property
    def is_reused(self) -> bool:
        """Whether its tensor is host memory that is reused for other contents."""
        return self.lease is not None or self.is_lent

    def leave(self) -> None:
        """Reset the shard to ABSENT."""
        self.state = ShardState.ABSENT
        self.lease = self.tensor = self.read = None
        self.is_ahead = self.is_late = self.equals_store = self.is_lent = False


class Shards:
    """All shards of a stream."""

    def __init__(self) -> None:
        """Start with no shards."""
        self.made: list[Shard] = []
        self._sizes: Counter[int] = Counter()  # number of shards by bytes

    def make(self, key: str, numel: int, dtype: torch.dtype, owner: Any) -> Shard:
        """Make the record of a shard, once for each."""
        shard = Shard(key, numel, dtype, owner)
        self.made.append(shard)
        self._sizes[shard.nbytes] += 1
        return shard

    def recast(self, shard: Shard, dtype: torch.dtype) -> None:
        """Change the dtype of a shard that is in no slot."""
        self._sizes[shard.nbytes] -= 1
        shard.dtype = dtype
        self._sizes[shard.nbytes] += 1

    @property
    def repeated_bytes_max(self) -> int:
        """Largest size that occurs often: of the layers' shards, not of the embedding."""
        counts = self._sizes.items()
        repeated = [nbytes for nbytes, count in counts if count >= REPEATED_COUNT_MIN]
        return max(repeated, default=0)

    def prefetch_bytes(self, given: int | None) -> int:
        """Return the bytes that may be read ahead: `given`, else twice `repeated_bytes_max`."""
        if given is not None:
            return given
        return max(PREFETCH_BYTES_MIN, 2 * self.repeated_bytes_max)
