"""Shards without a slot: moved between drive and device in chunks, through the staging slots.

Such a shard is assembled in device memory when it is needed. If the store has all of it in host
memory, the store lends it instead. Knows shards and staging slots; never DeepSpeed. One thread at a
time may call.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from memascend.errors import StoreError
from memascend.streaming.background import BackgroundStep
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.streaming.parameters.shard_memory import ShardMemory
from memascend.transfer.staging import StagingSlots


class InChunks:
    """Moves one stream's shards without a slot. Without staging slots every shard has a slot."""

    def __init__(
        self,
        *,
        staging: StagingSlots | None,
        device: torch.device | None,
        background: BackgroundStep,
        memory: ShardMemory,
    ) -> None:
        """Take no memory yet.

        Args:
            staging: The slots that chunks pass through.
            device: Where shards are assembled.
            background: The optimizer's walk, which may still be writing shards.
            memory: Lends shards that the store has in memory.
        """
        self.staging = staging
        self._background, self._memory = background, memory
        # Made now: later zero.Init may have replaced torch.empty by a version that casts.
        self._on_device = torch.empty(0, device=None if staging is None else device)
        self._writing: set[Shard] = set()  # may still have writes in staging slots

    def prefetch(self, shard: Shard) -> None:
        """Start reading the first chunks, unless the shard is being written or can be lent."""
        is_new = shard not in self._writing and self._background.has_passed(shard.key)
        if self.staging is not None and is_new and not self._memory.offers(shard):
            with suppress(StoreError):  # not needed now; the read that needs it raises the error
                self.staging.prefetch.start(key=shard.key, numel=shard.numel, dtype=shard.dtype)

    def read(self, shard: Shard) -> None:
        """Set a DEFERRED shard's tensor: lent by the store, else read into device memory."""
        if self._memory.offers(shard):
            self.wait(shard)
            self._memory.lend(shard)
            return
        tensor = self._on_device.new_empty(shard.numel, dtype=shard.dtype)
        self._slots.read(key=shard.key, target=tensor)
        shard.tensor = tensor
        shard.become(ShardState.ARRIVED)

    def write(self, shard: Shard, source: torch.Tensor) -> None:
        """Start storing a flat tensor of any device; the source may be reused in stream order."""
        self._writing.add(shard)
        self._slots.store.reserve(key=shard.key, nbytes=shard.nbytes)
        self._slots.write(key=shard.key, source=source, dtype=shard.dtype)

    def wait(self, shard: Shard) -> None:
        """Wait for the shard's writes: the store may not have received all its chunks yet."""
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

    def drop(self, shard: Shard | None = None) -> None:
        """Drop prefetched chunks, of one shard or all: it is about to be written."""
        if self.staging is not None:
            self.staging.prefetch.drop(None if shard is None else shard.key)

    @property
    def _slots(self) -> StagingSlots:
        if self.staging is None:
            raise AssertionError("only a budget leaves a shard without a slot")
        return self.staging
