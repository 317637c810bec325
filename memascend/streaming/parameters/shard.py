"""The record of one shard: key, size, and location besides the store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from memascend.base.interfaces import Ticket
from memascend.memory.pool import Lease


class ShardState(Enum):
    """Location of a shard's contents, besides the store."""

    ABSENT = "nowhere"
    DELAYED = "nowhere: its read into a slot begins when the optimizer has written it"
    READING = "on their way from the drive to a slot"
    DEFERRED = "nowhere: there is no slot, so it is read when it is needed"
    ARRIVED = "in the tensor, equal to the store"
    LENT = "in the store's own memory, to be read and never written"
    CHANGED = "in the tensor, to be stored"
    KEPT = "still in the slot of a shard that was let go"
    RECALLED = "still in the slot of such a shard, which was requested again"


#: The states that may follow each; besides, each may be followed by ABSENT, in `Shard.reset`.
_FOLLOWING: dict[ShardState, set[ShardState]] = {
    ShardState.ABSENT: {ShardState.DELAYED, ShardState.DEFERRED, ShardState.CHANGED},
    ShardState.DELAYED: {ShardState.READING},
    ShardState.READING: {ShardState.ARRIVED},
    ShardState.DEFERRED: {ShardState.ARRIVED, ShardState.LENT},
    ShardState.ARRIVED: {ShardState.CHANGED, ShardState.KEPT},
    ShardState.LENT: set(),
    ShardState.CHANGED: set(),
    ShardState.KEPT: {ShardState.RECALLED},
    ShardState.RECALLED: {ShardState.ARRIVED, ShardState.CHANGED, ShardState.KEPT},
}
#: Requested, and not there yet.
_COMING = {ShardState.DELAYED, ShardState.READING, ShardState.DEFERRED, ShardState.RECALLED}
_HERE = {ShardState.ARRIVED, ShardState.LENT, ShardState.CHANGED}


@dataclass(slots=True, eq=False)
class Shard:
    """One shard: its key and size in the store, and its location.

    Attributes:
        key: Its name in the store.
        numel: Number of elements.
        dtype: Their dtype.
        owner: The object that it is a part of; used by the stream's caller only.
        state: Location of its contents. All attributes below are reset by `reset`.
        lease: The lease of its slot; None in device memory, lent, or without memory.
        tensor: Its memory; None while it has none.
        read: Its transfer from the drive while that is in flight.
    """

    key: str
    numel: int
    dtype: torch.dtype
    owner: Any = None
    state: ShardState = ShardState.ABSENT
    lease: Lease | None = None
    tensor: torch.Tensor | None = None
    read: Ticket | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.dtype.itemsize

    @property
    def is_coming(self) -> bool:
        """True from the request to read the shard until `read_now` has returned."""
        return self.state in _COMING

    @property
    def is_staged(self) -> bool:
        """True from the request until the shard is let go; its read may be in flight."""
        return self.state in _COMING or self.state in _HERE

    @property
    def is_lent(self) -> bool:
        """Whether its tensor is the store's own memory, to be read and never written."""
        return self.state is ShardState.LENT

    @property
    def is_reused(self) -> bool:
        """Whether its tensor is host memory that is reused for other contents."""
        return self.lease is not None or self.is_lent

    def become(self, state: ShardState) -> None:
        """Change the state to one that may follow; `reset` makes it ABSENT."""
        if state not in _FOLLOWING[self.state]:
            raise AssertionError(f"{self.key} is {self.state.name} and cannot become {state.name}")
        self.state = state

    def reset(self) -> None:
        """Reset the shard to ABSENT, from any state."""
        self.state = ShardState.ABSENT
        self.lease = self.tensor = self.read = None
