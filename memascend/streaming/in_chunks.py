"""Shards that have no slot: in chunks between the drive and the device, through the staging slots.

Such a shard is assembled in device memory when it is needed; where the store has all of it in host
memory it is lent instead. Knows shards and staging slots; never DeepSpeed. One thread at a time may
call.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from memascend.errors import StoreError
from memascend.streaming.loans import Loans
from memascend.streaming.shards import Shard
from memascend.streaming.staging import StagingSlots
from memascend.streaming.walk import Walk


class InChunks:
    """Of one stream. Without staging slots every shard has a slot, and there is nothing to do."""

    def __init__(
        self,
        *,
        staging: StagingSlots | None,
        device: torch.device | None,
        walk: Walk,
        loans: Loans,
    ) -> None:
        """Take nothing yet.

        Args:
            staging: Through which chunks travel.
            device: Where shards are assembled.
            walk: The optimizer's, which may still be writing shards.
            loans: Of shards that the store has in memory.
        """
        self.staging = staging
        self._walk, self._loans = walk, loans
        # Not torch.empty later: zero.Init replaces it by one that casts.
        self._on_device = torch.empty(0, device=None if staging is None else device)
        self._writing: set[Shard] = set()  # staging slots may still have writes of these

    def read_ahead(self, shard: Shard) -> None:
        """Start reading the first chunks, as far as that waits for nothing and is of use."""
        is_new = shard not in self._writing and self._walk.has_passed(shard.key)
        if self.staging is not None and is_new and not self._loans.offers(shard):
            with suppress(StoreError):  # nobody needs it now; who does will see the error
                self.staging.ahead.start(key=shard.key, numel=shard.numel, dtype=shard.dtype)

    def read(self, shard: Shard) -> None:
        """Have a shard in its tensor."""
        if self._loans.offers(shard):
            self.wait(shard)
            self._loans.take(shard)
            return
        tensor = self._on_device.new_empty(shard.numel, dtype=shard.dtype)
        self._slots.read(key=shard.key, target=tensor)
        shard.tensor = tensor

    def write(self, shard: Shard, source: torch.Tensor) -> None:
        """Start storing a flat tensor of any device; the source may be reused in stream order."""
        self._writing.add(shard)
        self._slots.store.reserve(key=shard.key, nbytes=shard.nbytes)
        self._slots.write(key=shard.key, source=source, dtype=shard.dtype)

    def wait(self, shard: Shard) -> None:
        """Wait before a shard moves through a slot: the store may not know yet of its chunks."""
        if shard in self._writing:
            self.wait_writes()

    def wait_writes(self) -> None:
        """Wait until everything written is in the store.

        Raises:
            StoreError: A write failed; the others have been waited for.
        """
        if self.staging is not None:
            self.staging.wait_writes()
            self._writing.clear()  # not before: Ctrl-C may end the wait

    def forget(self, shard: Shard | None = None) -> None:
        """Forget what was read ahead, of one shard or all: it is about to be written."""
        if self.staging is not None:
            self.staging.ahead.forget(None if shard is None else shard.key)

    @property
    def _slots(self) -> StagingSlots:
        if self.staging is None:
            raise AssertionError("only a budget leaves a shard without a slot")
        return self.staging
