"""Size classes from a model's shapes, and leases on slots of those sizes.

`derive_classes` is arithmetic for the plan and needs neither torch nor the native core at work.
`ParameterPool` adds to the native pool the one decision it leaves open: whether to grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from memascend import _core
from memascend.base.units import format_nbytes
from memascend.errors import PoolExhaustedError
from memascend.memory.allocator import HostAllocator

if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
CLASS_COUNT_MAX = 16
MERGE_WASTE_MAX = 1 / 16  # of the larger slot


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Slots of one size, and how many tensors of the model are served by it."""

    name: str
    slot_bytes: int
    count_in_model: int


def derive_classes(sizes_bytes: Iterable[int]) -> list[SizeClass]:
    """Size classes for tensors of the given sizes, smallest first; at most CLASS_COUNT_MAX.

    One class per distinct size in whole pages, but a size joins the next larger class where that
    wastes no more than MERGE_WASTE_MAX of the slot. If too many remain, the neighbours whose
    merging wastes the fewest bytes over the whole model are merged. Empty tensors need no slot.
    """
    counts = Counter(_round_up(nbytes) for nbytes in sizes_bytes if nbytes > 0)
    groups: list[tuple[int, int]] = []  # (slot_bytes, count), largest first
    for slot_bytes, count in sorted(counts.items(), reverse=True):
        if groups and groups[-1][0] - slot_bytes <= MERGE_WASTE_MAX * groups[-1][0]:
            groups[-1] = (groups[-1][0], groups[-1][1] + count)
        else:
            groups.append((slot_bytes, count))
    while len(groups) > CLASS_COUNT_MAX:
        _merge_cheapest(groups)
    return [
        SizeClass(name=_class_name(slot_bytes), slot_bytes=slot_bytes, count_in_model=count)
        for slot_bytes, count in reversed(groups)
    ]


class ParameterPool:
    """Leases on slots whose sizes were derived from the model.

    Thread-safe where the native pool is; two threads that grow one class at once add a slot each.
    """

    def __init__(self, *, allocator: HostAllocator, component: str = "parameter_pool") -> None:
        self.core = _core.Pool(allocator=allocator.core, component=component)

    def add_class(self, size_class: SizeClass, *, slot_count: int) -> None:
        """Adds a class with `slot_count` slots, taken from the allocator now.

        Raises:
            ValueError: The name or the size is there already.
            HostMemoryError: The allocator's limit or the system does not allow the slots.
        """
        self.core.add_class(
            name=size_class.name, slot_bytes=size_class.slot_bytes, slot_count=slot_count
        )

    def acquire(self, nbytes: int, *, grow: bool) -> _core.Lease:
        """A lease on a slot for `nbytes`: a free one of its class, else, with `grow`, a new one.

        Without `grow`, a free slot of a larger class serves too: memory that is there already.

        Raises:
            PoolExhaustedError: No slot, and growing is not allowed or no class is large enough.
            HostMemoryError: The allocator's limit or the system does not allow a new slot.
        """
        lease = self.core.acquire(nbytes=nbytes, allow_larger=not grow)
        while lease is None:
            exhaustion = self.core.exhaustion(nbytes=nbytes)
            if not grow or not exhaustion.class_name:
                raise PoolExhaustedError(explain(exhaustion, self.core.classes()))
            # Another thread may take the new slot first; then add one more.
            self.core.add_slots(name=exhaustion.class_name, count=1)
            lease = self.core.acquire(nbytes=nbytes)
        return lease

    def release(self, lease: _core.Lease) -> None:
        """Gives a lease up. Its slot is leased again once no I/O holds it; again is harmless."""
        lease.release()

    def classes(self) -> list[_core.ClassStats]:
        """Slots, leased and peak of every class, smallest slots first."""
        return self.core.classes()


class ArenaSlots:
    """Slots as the parameter path takes them: classes appear with the shapes that arrive.

    A model is partitioned tensor by tensor, so at first its shapes are not known. A size gets a
    class of its own unless an existing one fits within MERGE_WASTE_MAX.
    """

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
        import torch

        return torch.frombuffer(lease, dtype=dtype, count=numel)

    def _class_name(self, nbytes: int) -> str | None:
        for stats in self._pool.classes():  # smallest slots first
            if stats.slot_bytes >= nbytes:
                fits = stats.slot_bytes - nbytes <= max(
                    PAGE_BYTES, MERGE_WASTE_MAX * stats.slot_bytes
                )
                return stats.name if fits else None
        return None


def explain(exhaustion: _core.Exhaustion, classes: Sequence[_core.ClassStats]) -> str:
    """An exhaustion as a message: what failed, with what values, likely cause, what to do."""
    asked = f"no slot for {exhaustion.requested_bytes} bytes"
    if not exhaustion.class_name:
        largest = max((one.slot_bytes for one in classes), default=0)
        return (
            f"{asked}: the largest size class has slots of {largest} bytes. likely cause: a tensor "
            "the classes were not derived from. fix: add a class, or move the tensor in chunks"
        )
    return (
        f"{asked}: size class '{exhaustion.class_name}' ({exhaustion.slot_bytes} bytes a slot) has "
        f"{exhaustion.leased_count} of {exhaustion.slot_count} slots leased. likely cause: more "
        "tensors in use at once than planned. fix: give the class more slots, allow it to grow, or "
        "prefetch less"
    )


def _merge_cheapest(groups: list[tuple[int, int]]) -> None:
    """Merges the two neighbours (largest first) whose merging wastes the fewest bytes."""
    wastes = [(larger[0] - smaller[0]) * smaller[1] for larger, smaller in pairwise(groups)]
    index = wastes.index(min(wastes))
    (slot_bytes, larger_count), (_, smaller_count) = groups[index : index + 2]
    groups[index : index + 2] = [(slot_bytes, larger_count + smaller_count)]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _class_name(slot_bytes: int) -> str:
    # The exact size, not a rounded one, follows where two classes would read the same.
    return f"{format_nbytes(slot_bytes).replace(' ', '')}/{slot_bytes // PAGE_BYTES}p"
