"""What bounds the host memory of the parameter path, and how much of it is read ahead.

Arithmetic alone: nothing here takes memory. All of it follows from the configuration and the sizes
that occur, never from time, so that every rank comes to the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memascend.streaming.staging import StagingSlots

#: Read ahead at least this much, so that small models are not read tensor by tensor.
PREFETCH_BYTES_MIN = 32 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """What bounds the host memory of parameters.

    Attributes:
        nbytes: All slots together; the pool keeps to it.
        slot_bytes_max: Largest shard that is staged in a slot.
        page_bytes: A slot takes whole pages.
        staging: Through which larger shards travel.
        device: Where they are assembled.
    """

    nbytes: int
    slot_bytes_max: int
    page_bytes: int
    staging: StagingSlots
    device: torch.device

    @property
    def share_bytes(self) -> int:
        """What one turn may take, and what may be read ahead: together they fit."""
        return self.nbytes // 2

    def slot_bytes(self, nbytes: int) -> int:
        """What a shard takes of the budget: nothing when it is too large for a slot."""
        if nbytes > self.slot_bytes_max:
            return 0
        return -(-nbytes // self.page_bytes) * self.page_bytes


def derive_prefetch_bytes(sizes: Iterable[int]) -> int:
    """Two of the largest tensor that occurs three times: the layers', not the embedding's."""
    counts = Counter(sizes)
    repeated = [nbytes for nbytes, count in counts.items() if count >= 3]
    return max(PREFETCH_BYTES_MIN, 2 * max(repeated, default=0))
