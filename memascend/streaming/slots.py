"""Slots of an arena pool as the parameter path takes them: classes appear with the shapes that arrive.

A model is partitioned tensor by tensor, so at first its shapes are not known. A size gets a class of its
own unless an existing one fits within MERGE_WASTE_MAX.
"""

from __future__ import annotations

import torch

from memascend import _core
from memascend.pool import MERGE_WASTE_MAX, ParameterPool, derive_classes


class ArenaSlots:
    """The SlotPool of the parameter path over a ParameterPool."""

    def __init__(self, pool: ParameterPool) -> None:
        self._pool = pool

    def acquire(self, nbytes: int) -> _core.Lease | None:
        """A lease of the class for `nbytes`, or None when there is no class or no free slot."""
        return self._pool.core.acquire(nbytes=nbytes) if self._class_name(nbytes) else None

    def grow(self, nbytes: int) -> None:
        """Adds a slot to the class for `nbytes`, making the class when it is new.

        Raises:
            HostMemoryError: The allocator's limit or the system does not allow it.
        """
        name = self._class_name(nbytes)
        if name is None:
            (size_class,) = derive_classes([nbytes])
            self._pool.add_class(size_class, slot_count=1)
        else:
            self._pool.core.add_slots(name=name, count=1)

    def view(self, lease: _core.Lease, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `numel` elements of the slot; the tensor keeps the memory mapped."""
        return torch.frombuffer(lease, dtype=dtype, count=numel)

    def _class_name(self, nbytes: int) -> str | None:
        for stats in self._pool.classes():  # smallest slots first
            if stats.slot_bytes >= nbytes:
                fits = stats.slot_bytes - nbytes <= max(4096, MERGE_WASTE_MAX * stats.slot_bytes)
                return stats.name if fits else None
        return None
