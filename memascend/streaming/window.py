"""The window: gradients that wait on the drive as they arrived, to be added up in one go.

A micro-step that adds its gradient to an fp32 sum at once moves 8 bytes of the drive for each
element. One that appends it, in the 16 bits in which it arrived, writes 2, and waits for nothing; 2
more are read when the window is over. They are added in the order in which they came, in the sum's
dtype, on the device they came from: the sum is the same to the bit. Where the dtypes are equal
appending would move as many bytes as adding does, so there each gradient is added as it comes.

Here are also the records of what a shard has on the drive. Knows torch and the slots; never
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import torch

from memascend.base.sizes import APPENDED_COUNT_MAX
from memascend.streaming.staging import StagingSlots

Factor = float | torch.Tensor

#: Places of sums; the third holds values that were set or multiplied for good, the rest a window.
SUM_PLACES = (0, 1)
SET_PLACE = 2
WINDOW_PLACES = range(3, 3 + APPENDED_COUNT_MAX)

#: Elements that are widened at once on the host, where torch makes a copy.
_WIDENED_NUMEL = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredGradient:
    """A value on the drive: `numel` elements of `dtype` in one of a shard's places."""

    key: str
    place: int
    numel: int
    dtype: torch.dtype


@dataclass(slots=True)
class Window:
    """What is to be added to a shard's latest value, or to take its place.

    Attributes:
        replaces: The first gradient takes its place.
        numel: Elements.
        dtype: In which they are added.
        device: Where they are added.
        gradients: On the drive, as they arrived, in order.
    """

    replaces: bool
    numel: int
    dtype: torch.dtype
    device: torch.device
    gradients: list[StoredGradient] = field(default_factory=list)

    def add_up(
        self,
        slots: StagingSlots,
        latest: StoredGradient | None,
        last: torch.Tensor | None,
        places: TilePlaces | None = None,
    ) -> Generator[tuple[int, torch.Tensor, torch.Tensor], None, None]:
        """Yield the sum chunk by chunk: where each begins, a slot for it, and the sum itself.

        The slot is the caller's to fill, unless it has the sum already, and to end.

        Args:
            slots: What everything passes through.
            latest: The shard's, of `dtype`; None is zero, which makes 0.0 of a first -0.0.
            last: One more gradient, of `dtype` and on `device`.
            places: No chunk is to lie in two of their tiles.

        Raises:
            StoreError: A read failed.
        """
        has_latest = latest is not None and not self.replaces
        stored = [latest, *self.gradients] if latest and has_latest else self.gradients
        numel_max = slots.slot_bytes // self.dtype.itemsize
        cut = slots.chunks(self.numel, self.dtype.itemsize)
        chunks = list(cut if places is None else places.chunks(self.numel, numel_max))
        runs = (
            (one.key, begin * one.dtype.itemsize, count, one.dtype)
            for begin, count in chunks
            for one in stored
        )
        # The sum's slot is kept while others are added to it.
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
        """Add a gradient to a value, or begin one with it; give its slot back."""
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


@dataclass(frozen=True, slots=True)
class TilePlaces:
    """Where parts of one gradient go instead of to the drive.

    Attributes:
        offset: Its first element in the sub-group.
        tile_numel: Elements of a tile.
        find: Returns host memory for so many elements, of one tile, from one of the sub-group on;
            None: they go to the drive.
    """

    offset: int
    tile_numel: int
    find: Callable[[int, int], torch.Tensor | None]

    def chunks(self, numel: int, numel_max: int) -> Iterator[tuple[int, int]]:
        """Cut the gradient into (begin, count) runs that lie in one tile each, and fit a slot."""
        begin, end = self.offset, self.offset + numel
        while begin < end:
            following = (begin // self.tile_numel + 1) * self.tile_numel
            count = min(following, end, begin + numel_max) - begin
            yield begin - self.offset, count
            begin += count


@dataclass(slots=True)
class GradientShard:
    """Record of one parameter's gradient on this rank.

    Attributes:
        name: What its keys begin with.
        offset: First element in the sub-group.
        latest: The sum in the making; None before the first one.
        window: What is still to be added to it, if anything.
        seen: What the next step works on; None reads as zero, as do elements behind its end.
        factors: What finished steps multiplied the seen value by, in order.
        squares: Sum of squares of `latest`, 0-dim; fp64 where the device has it.
        away: Begin, in the sub-group, and elements of what of the seen value is not on the drive:
            tiles have it, or had it.
    """

    name: str
    offset: int
    latest: StoredGradient | None = None
    window: Window | None = None
    seen: StoredGradient | None = None
    factors: list[Factor] = field(default_factory=list)
    squares: torch.Tensor | None = None
    away: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether it never got a gradient."""
        return self.latest is None and self.window is None

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
    """Make zero what no part of a range fills."""
    end = 0
    for part in sorted(parts, key=lambda part: part.begin):
        target.narrow(0, end, part.begin - end).zero_()
        end = part.begin + part.count
    target.narrow(0, end, target.numel() - end).zero_()
