"""Slots of shards that were let go: copied from still, or whole still and worth keeping.

A pass over the model is often followed by one in the opposite order: backward after forward, or the
recomputation of a layer and then its backward. What was used last is then needed first, so slots
are given up oldest first, and only when another shard needs the room. No memory is taken for this.

Only what equals the store may be put here, and it is forgotten before anybody else writes the key.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from memascend.base.interfaces import Event, Lease, Ticket


@dataclass(slots=True)
class Staged:
    """One shard in a slot, or in device memory when it has no lease.

    Attributes:
        key: Its name in the store.
        numel: Elements.
        dtype: Their type.
        lease: Of its slot.
        tensor: None while a shard without a slot waits to be needed.
        read: Its transfer from the drive while that is in flight.
        equals_store: Whether it was read and nobody was asked to change it.
        copied: Passes when the last copy out of the slot is over; None when none is under way.
    """

    key: str
    numel: int
    dtype: torch.dtype
    lease: Lease | None
    tensor: torch.Tensor | None
    read: Ticket | None = None
    equals_store: bool = False
    copied: Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.dtype.itemsize


class ReturningSlots:
    """Slots of shards that were let go, until another shard needs them."""

    def __init__(self) -> None:
        """Nothing is on its way back yet."""
        self._kept: dict[str, Staged] = {}  # let go longest ago first
        self._copying: deque[tuple[Event, Lease]] = deque()

    def put(self, staged: Staged, *, keeps: bool) -> None:
        """Takes a shard's slot.

        Args:
            staged: It has a lease.
            keeps: Whether `take` may give the shard again, if it equals the store.
        """
        if keeps and staged.equals_store:
            self._kept[staged.key] = staged
        else:
            self._free(staged)

    def take(self, key: str) -> Staged | None:
        """The shard, which is the caller's again; None when it is not kept."""
        return self._kept.pop(key, None)

    def forget(self, key: str) -> None:
        """Makes sure that `take` does not give a key."""
        staged = self._kept.pop(key, None)
        if staged is not None:
            self._free(staged)

    def drain(self) -> None:
        """Frees every slot, once the copies out of it are over."""
        while self.free_oldest():
            pass
        while self._copying:
            self._wait_copy()

    def free_passed(self) -> None:
        """Frees slots whose copies turn out to be over."""
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()[1].release()

    def free_oldest(self) -> bool:
        """Gives up the shard that was let go longest ago; False when none is kept.

        A copy out of its slot is waited for: giving up others meanwhile would not be sooner, since
        theirs were issued later.
        """
        oldest = next(iter(self._kept), None)
        if oldest is None:
            return False
        staged = self._kept.pop(oldest)
        self._free(staged)
        if staged.copied is not None:
            while self._copying:
                self._wait_copy()
        return True

    def wait_for_one(self, nbytes: int | None) -> bool:
        """Waits for the oldest copy out of a slot of such a size; False when there is none.

        Args:
            nbytes: Of the shard that needs a slot; None where a slot of any size gives room.
        """
        if any(
            nbytes is None or nbytes <= lease.slot_bytes < 2 * nbytes for _, lease in self._copying
        ):
            self._wait_copy()
            return True
        return False

    def _wait_copy(self) -> None:
        event, lease = self._copying.popleft()
        event.synchronize()
        lease.release()

    def _free(self, staged: Staged) -> None:
        assert staged.lease is not None
        if staged.copied is None:
            staged.lease.release()
        else:
            self._copying.append((staged.copied, staged.lease))
