"""The window: gradients that wait on the drive as they arrived, and are added up in one pass.

A micro-step that adds its gradient to an fp32 sum at once causes 8 bytes of drive traffic per
element. One that appends the gradient, in the 16 bits in which it arrived, writes 2 and waits for
no read; 2 more are read at the end of the window. The gradients are added in order of arrival, in
the sum's dtype, on the device they came from: the sum is bit-identical. If the dtypes are equal,
appending would move as many bytes as adding, so each gradient is added as it arrives.

Also defines the records of a shard's values on the drive. Knows torch and the slots; never
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field

import torch

from memascend.base.sizes import APPENDED_COUNT_MAX
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.transfer.staging import StagingSlots

Factor = float | torch.Tensor

#: Places of sums; the third holds values that were set, or stored as a product; the rest a window.
SUM_PLACES = (0, 1)
SET_PLACE = 2
WINDOW_PLACES = range(3, 3 + APPENDED_COUNT_MAX)

#: Elements that are widened at once on the host: torch makes a temporary copy of them.
_WIDENED_NUMEL = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredGradient:
    """A value on the drive: `numel` elements of `dtype` in one of a shard's places.

    `is_update`: it is the update that a gradient has become, which is stored nowhere.
    """

    key: str
    place: int
    numel: int
    dtype: torch.dtype
    is_update: bool = False


@dataclass(slots=True)
class Window:
    """Gradients to be added to a shard's latest value, or to replace it.

    Attributes:
        replaces: Whether the sum replaces the latest value.
        numel: Number of elements.
        dtype: The sum's dtype.
        device: The device they are added on.
        gradients: The appended gradients on the drive, in order of arrival.
    """

    replaces: bool
    numel: int
    dtype: torch.dtype
    device: torch.device
    gradients: list[StoredGradient] = field(default_factory=list)

    def is_replaced_by(self, last: torch.Tensor | None) -> bool:
        """Return whether the sum is the last gradient itself."""
        return self.replaces and not self.gradients and last is not None

    def chunks(self, slots: StagingSlots, bypass: DriveBypass | None) -> Iterable[tuple[int, int]]:
        """Cut the sum into (begin, count) runs that fit a slot and lie in one tile of a bypass."""
        if bypass is None:
            return slots.chunks(self.numel, self.dtype.itemsize)
        return bypass.chunks(self.numel, slots.slot_bytes // self.dtype.itemsize)

    def add_up(
        self,
        slots: StagingSlots,
        latest: StoredGradient | None,
        last: torch.Tensor | None,
        bypass: DriveBypass | None = None,
    ) -> Generator[tuple[int, torch.Tensor, torch.Tensor], None, None]:
        """Yield the sum chunk by chunk: (first element, a slot for it, the sum).

        The caller fills the slot, unless it holds the sum already, and submits it or gives it back.

        Args:
            slots: The staging slots that all chunks pass through.
            latest: The shard's, of `dtype`; None adds to zero, which turns a first -0.0 into 0.0.
            last: One more gradient, of `dtype` and on `device`.
            bypass: Cut chunks at the borders of these tiles.

        Raises:
            StoreError: A read failed.
        """
        has_latest = latest is not None and not self.replaces
        stored = [latest, *self.gradients] if latest and has_latest else self.gradients
        chunks = list(self.chunks(slots, bypass))
        runs = (
            (one.key, begin * one.dtype.itemsize, count, one.dtype)
            for begin, count in chunks
            for one in stored
        )
        # The sum's slot stays taken while the others are added to it.
        with closing(slots.read_each(runs, ahead=None if self.gradients else 1)) as reads:
            for begin, count in chunks:
                staged = next(reads) if has_latest else slots.take(count, self.dtype)
                with slots.given_back_on_error(staged):
                    value = None
                    if not self.replaces:
                        value = staged if has_latest else staged.zero_()
                        value = value.to(self.device, non_blocking=True)
                    for _ in self.gradients:
                        value = self._add(slots, staged, value, next(reads))
                    if last is not None:
                        piece = last.narrow(0, begin, count)
                        value = piece if value is None else value.add_(piece)
                    assert value is not None
                yield begin, staged, value

    def _add(
        self,
        slots: StagingSlots,
        staged: torch.Tensor,
        value: torch.Tensor | None,
        arrived: torch.Tensor,
    ) -> torch.Tensor:
        """Return `value` plus a gradient (None counts as zero); give the gradient's slot back."""
        try:
            moved = arrived.to(self.device, non_blocking=True)
            if self.device.type != "cpu":
                return moved.to(self.dtype) if value is None else value.add_(moved)
            if value is None:
                return staged.copy_(moved)
            for begin in range(0, value.numel(), _WIDENED_NUMEL):
                part = slice(begin, begin + _WIDENED_NUMEL)
                value[part].add_(moved[part].to(self.dtype))
            return value
        finally:
            slots.give_back(arrived)


@dataclass(slots=True)
class GradientShard:
    """Record of one parameter's gradient on this rank.

    Attributes:
        name: Prefix of its keys.
        offset: First element in the sub-group.
        latest: The partial sum; None before the first one.
        window: Gradients still to be added to `latest`, if any.
        seen: The value that the next step uses; None reads as zero, as do elements past its end.
        factors: Factors by which finished steps multiplied `seen`, in order.
        squares: Sum of squares of `latest`, 0-dim; fp64 if the device supports it.
        bypassed: (first element in the sub-group, count) of each part of `seen` that was given to a
            tile, and so is not on the drive.
        is_replaced: Whether the next step would use an update instead of `seen`, which was made of
            it and is not on the drive.
    """

    name: str
    offset: int
    latest: StoredGradient | None = None
    window: Window | None = None
    seen: StoredGradient | None = None
    factors: list[Factor] = field(default_factory=list)
    squares: torch.Tensor | None = None
    bypassed: list[tuple[int, int]] = field(default_factory=list)
    is_replaced: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the shard never got a gradient."""
        return self.latest is None and self.window is None

    @property
    def is_used_up(self) -> bool:
        """Whether nothing can be added to `latest`: it is an update, or tiles were given parts."""
        latest = self.latest
        has_gone = bool(self.bypassed) and latest is self.seen
        return latest is not None and (latest.is_update or has_gone)

    def key(self, place: int) -> str:
        """Return the store's name for one of the shard's places."""
        return f"{self.name}.{place}"


@dataclass(frozen=True, slots=True)
class SeenPart:
    """Part of a seen value that falls into a range of its sub-group."""

    shard: GradientShard
    value: StoredGradient
    begin: int  # in the range
    count: int
    value_begin: int

    @property
    def offset_bytes(self) -> int:
        """Offset of its first byte in the value's key."""
        return self.value_begin * self.value.dtype.itemsize


def zero_between(parts: Iterable[SeenPart], target: torch.Tensor) -> None:
    """Zero the elements of `target` that no part fills."""
    end = 0
    for part in sorted(parts, key=lambda part: part.begin):
        target.narrow(0, end, part.begin - end).zero_()
        end = part.begin + part.count
    target.narrow(0, end, target.numel() - end).zero_()
