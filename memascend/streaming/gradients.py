"""The gradient path: from the device through staging slots to the drive, and back for the step.

Knows torch, the store and the slots; never DeepSpeed. Replaces a flat host buffer of all gradients
and keeps its meaning to the last bit, stale values included: as under CPU offload, a shard that got
no gradient for a step still holds what the last step left there, zero at first.

A shard's gradient is two values at most. `latest` is what the micro-steps of this window have added
up; `seen` is what the next optimizer step works on: the sum of the last window in whose final
micro-step the shard got a gradient. They part only while a window is under way (or when its final
micro-step passes a shard by), so a sum in the making goes to the other one of two places on the
drive and never overwrites what is seen. The sum of squares is found while the bytes pass by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from memascend.base.interfaces import TensorIO, Ticket
from memascend.streaming.staging import StagingSlots

#: A shard that gets no gradient is multiplied by every step's factor; after so many the product is
#: written back.
FACTOR_COUNT_MAX = 8

Factor = float | torch.Tensor
#: Called with `key`, `nbytes` and `over`: the first is about to be written, the last is needed less
#: from now on; a store that keeps some keys in memory keeps the first.
Prefer = Callable[..., None]
#: Gives the sum of squares of a flat tensor as a 0-dim fp64 tensor; not finite exactly if an
#: element is not.
SumOfSquares = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredGradient:
    """A value on the drive: `numel` elements of `dtype` in one of a shard's places."""

    key: str
    place: int
    numel: int
    dtype: torch.dtype


@dataclass(slots=True)
class GradientShard:
    """What is known of one parameter's gradient on this rank.

    Attributes:
        name: What its keys begin with.
        offset: First element in the sub-group.
        latest: The sum in the making; None before the first gradient.
        seen: What the next step works on; None reads as zero, as do elements behind its end.
        factors: What finished steps multiplied the seen value by, in order.
        squares: Sum of squares of `latest`, 0-dim fp64.
    """

    name: str
    offset: int
    latest: StoredGradient | None = None
    seen: StoredGradient | None = None
    factors: list[Factor] = field(default_factory=list)
    squares: torch.Tensor | None = None


#: Places of sums; the third holds values that were set or multiplied for good.
_SUM_PLACES = (0, 1)
_SET_PLACE = 2


@dataclass(frozen=True, slots=True)
class Run:
    """The part of a seen value that falls into a range of its sub-group."""

    shard: GradientShard
    value: StoredGradient
    begin: int  # in the range
    count: int
    value_begin: int

    @property
    def offset_bytes(self) -> int:
        """Where it starts in the value's key."""
        return self.value_begin * self.value.dtype.itemsize


class GradientSpool:
    """Gradients by sub-group and offset. One thread at a time may call."""

    def __init__(
        self,
        *,
        store: TensorIO,
        slots: StagingSlots,
        sum_of_squares: SumOfSquares | None = None,
        prefer: Prefer | None = None,
    ) -> None:
        """Gives an empty spool: every gradient reads as zero.

        Args:
            store: Where the gradients are kept.
            slots: What they pass through.
            sum_of_squares: None when nobody asks for norms.
            prefer: None when the store keeps nothing in memory.
        """
        self._store = store
        self._slots = slots
        self._sum_of_squares = sum_of_squares
        self._prefer = prefer
        self._shards: dict[str, dict[int, GradientShard]] = {}

    # -- backward --------------------------------------------------------------------------------

    def put(
        self,
        group: str,
        offset: int,
        gradient: torch.Tensor,
        *,
        accumulate: bool = False,
        final: bool = True,
        consume: Callable[[int, torch.Tensor], None] | None = None,
    ) -> GradientShard:
        """Takes the gradient of one shard; it may be overwritten on return, in stream order.

        Args:
            group: Name of the sub-group.
            offset: First element of the shard in it.
            gradient: 1-D, on any device.
            accumulate: Add to the latest value instead of replacing it.
            final: The step sees the result; else it sees it after `finish`.
            consume: Called with offset in the shard and value of every chunk of the result.

        Raises:
            StoreError: The drive failed.
            StoreFullError: The drive is full.
        """
        shard = self._shard(group, offset)
        target = self._target(shard, gradient, final=final, anew=not accumulate)
        squares: torch.Tensor | None = None
        for begin, count in self._slots.chunks(gradient.numel(), gradient.element_size()):
            piece = gradient.narrow(0, begin, count)
            staged = self._start_chunk(shard, begin, piece, accumulate=accumulate)
            with self._given_back_on_error(staged):
                value = _fill(staged, piece, accumulate=accumulate)
                if self._sum_of_squares is not None:
                    part = self._sum_of_squares(value)
                    squares = part if squares is None else squares + part
                if consume is not None:
                    consume(begin, value)
            self._slots.submit(target.key, staged, begin * gradient.element_size())
        shard.latest, shard.squares = target, squares
        if final:
            self.finish(group, offset)
        return shard

    def finish(self, group: str, offset: int) -> None:
        """Makes the latest value of a shard the one that the next step sees."""
        shard = self._shards[group][offset]
        self._see(shard, shard.latest)

    def find(self, group: str, offset: int) -> GradientShard | None:
        """The shard at an offset, or None when it never got a gradient."""
        return self._shards.get(group, {}).get(offset)

    def sum_of_squares(self) -> torch.Tensor:
        """Over the latest values of all shards; not finite exactly if an element is not."""
        total = torch.zeros((), dtype=torch.float64)
        for shards in self._shards.values():
            for shard in shards.values():
                if shard.squares is not None:
                    total = total.to(shard.squares.device) + shard.squares
        return total

    # -- the step --------------------------------------------------------------------------------

    def runs(self, group: str, begin: int, count: int) -> Iterator[Run]:
        """What is seen in a range of a sub-group, in no order."""
        for shard in self._shards.get(group, {}).values():
            value = shard.seen
            if value is None:
                continue
            first = max(begin, shard.offset)
            last = min(begin + count, shard.offset + value.numel)
            if first < last:
                yield Run(shard, value, first - begin, last - first, first - shard.offset)

    def start_read(self, group: str, begin: int, raw: torch.Tensor) -> list[Ticket]:
        """Starts reading a range as it is stored, for `load` once the tickets are done.

        Values of another dtype than that of `raw` are left to `load`.
        """
        self._slots.submit_all()
        return [
            self._store.read(
                key=run.value.key,
                target=raw.narrow(0, run.begin, run.count),
                offset_bytes=run.offset_bytes,
            )
            for run in self.runs(group, begin, raw.numel())
            if run.value.dtype == raw.dtype
        ]

    def load(self, group: str, begin: int, raw: torch.Tensor, gradient: torch.Tensor) -> None:
        """Makes gradients of what `start_read` has read; `gradient` may be `raw` itself."""
        end = 0
        for run in sorted(self.runs(group, begin, raw.numel()), key=lambda run: run.begin):
            gradient.narrow(0, end, run.begin - end).zero_()
            end = run.begin + run.count
            target = gradient.narrow(0, run.begin, run.count)
            if run.value.dtype != raw.dtype:
                self._read(run, target)
            elif gradient is not raw:
                target.copy_(raw.narrow(0, run.begin, run.count))
            for factor in run.shard.factors:
                target.mul_(factor)
        gradient.narrow(0, end, raw.numel() - end).zero_()

    def note_factor(self, group: str, factor: Factor, dtype: torch.dtype) -> None:
        """Remembers that a step has multiplied every gradient of a sub-group.

        Args:
            group: Name of the sub-group.
            factor: What `mul_` was called with.
            dtype: The step's, in which a product is stored when many have gathered.
        """
        if factor == 1.0:
            return
        for shard in self._shards.get(group, {}).values():
            if shard.seen is None:
                continue
            shard.factors.append(factor)
            if len(shard.factors) > FACTOR_COUNT_MAX:
                self._multiply(shard, shard.seen, dtype)

    # -- single values ---------------------------------------------------------------------------

    def get(self, group: str, begin: int, target: torch.Tensor) -> None:
        """Fills a host tensor with the gradients of a range as the next step would see them."""
        target.zero_()
        for run in self.runs(group, begin, target.numel()):
            part = target.narrow(0, run.begin, run.count)
            self._read(run, part)
            for factor in run.shard.factors:
                part.mul_(factor)

    def set(self, group: str, offset: int, value: torch.Tensor) -> None:
        """Replaces what the next step sees of the shard at `offset`, in the dtype of `value`."""
        shard = self._shard(group, offset)
        target = self._reserve(shard, _SET_PLACE, value)
        self._slots.write(key=target.key, source=value)
        self._see(shard, target)

    def discard(self) -> None:
        """Forgets every gradient and gives the drive's space back."""
        self._slots.wait_writes()
        for shards in self._shards.values():
            for shard in shards.values():
                for place in (*_SUM_PLACES, _SET_PLACE):
                    self._store.discard(key=_key(shard, place))
        self._shards.clear()

    # -- inner -----------------------------------------------------------------------------------

    def _shard(self, group: str, offset: int) -> GradientShard:
        shards = self._shards.setdefault(group, {})
        if offset not in shards:
            shards[offset] = GradientShard(name=f"gradient.{group}.{offset}", offset=offset)
        return shards[offset]

    def _target(
        self, shard: GradientShard, gradient: torch.Tensor, *, final: bool, anew: bool
    ) -> StoredGradient:
        """Where the next value of a shard goes: never over what is seen, unless it takes over."""
        free = list(_SUM_PLACES)
        if not final and shard.seen is not None and shard.seen.place in free:
            free.remove(shard.seen.place)
        in_place = shard.latest is not None and shard.latest.place in free
        place = shard.latest.place if in_place and shard.latest is not None else free[0]
        if not in_place and shard.seen is not None and self._prefer is not None:
            # The sum is read and written by every micro-step; what is seen, most often never again.
            self._slots.submit_all()
            self._prefer(key=_key(shard, place), nbytes=gradient.nbytes, over=shard.seen.key)
        return self._reserve(shard, place, gradient, anew=anew)

    def _reserve(
        self, shard: GradientShard, place: int, like: torch.Tensor, *, anew: bool = True
    ) -> StoredGradient:
        key = _key(shard, place)
        if anew and key in self._slots.failed:
            # All of it is about to be written: a new place forgets what was lost in the old one.
            self._slots.submit_all()
            self._store.discard(key=key)
            self._slots.failed.discard(key)
        self._store.reserve(key=key, nbytes=like.nbytes)
        return StoredGradient(key=key, place=place, numel=like.numel(), dtype=like.dtype)

    def _start_chunk(
        self, shard: GradientShard, begin: int, piece: torch.Tensor, *, accumulate: bool
    ) -> torch.Tensor:
        """A slot for a piece; with `accumulate` the latest value is in it."""
        if not accumulate:
            return self._slots.take(piece.numel(), piece.dtype)
        if shard.latest is None:
            return self._slots.take(piece.numel(), piece.dtype).zero_()
        return self._slots.read_chunk(
            key=shard.latest.key,
            numel=piece.numel(),
            dtype=shard.latest.dtype,
            offset_bytes=begin * shard.latest.dtype.itemsize,
        )

    @contextmanager
    def _given_back_on_error(self, staged: torch.Tensor) -> Iterator[None]:
        """Inside, an error of whomever gives a taken slot back."""
        try:
            yield
        except BaseException:
            self._slots.give_back(staged)
            raise

    def _see(self, shard: GradientShard, value: StoredGradient | None) -> None:
        old, shard.seen = shard.seen, value
        shard.factors.clear()
        if old is not None and old.place == _SET_PLACE and (value is None or old.key != value.key):
            self._slots.submit_all()
            self._store.discard(key=old.key)

    def _multiply(self, shard: GradientShard, seen: StoredGradient, dtype: torch.dtype) -> None:
        """Stores the product of the seen value and its factors, in the step's dtype."""
        factors = tuple(shard.factors)
        key = _key(shard, _SET_PLACE)
        self._store.reserve(key=key, nbytes=seen.numel * dtype.itemsize)
        for begin, count in self._slots.chunks(seen.numel, max(dtype.itemsize, 4)):
            raw = self._slots.read_chunk(
                key=seen.key,
                numel=count,
                dtype=seen.dtype,
                offset_bytes=begin * seen.dtype.itemsize,
            )
            with self._given_back_on_error(raw):
                product = self._slots.take(count, dtype)
                with self._given_back_on_error(product):
                    product.copy_(raw)
                    for factor in factors:
                        product.mul_(factor)
            self._slots.give_back(raw)
            self._slots.submit(key, product, begin * dtype.itemsize)
        self._see(shard, StoredGradient(key, _SET_PLACE, seen.numel, dtype))

    def _read(self, run: Run, target: torch.Tensor) -> None:
        """Reads a run chunk by chunk, converting to the target's dtype."""
        itemsize = run.value.dtype.itemsize
        for begin, count in self._slots.chunks(run.count, itemsize):
            staged = self._slots.read_chunk(
                key=run.value.key,
                numel=count,
                dtype=run.value.dtype,
                offset_bytes=run.offset_bytes + begin * itemsize,
            )
            target.narrow(0, begin, count).copy_(staged)
            self._slots.give_back(staged)


def _fill(staged: torch.Tensor, piece: torch.Tensor, *, accumulate: bool) -> torch.Tensor:
    """Puts a piece into a slot, or adds it to what is there; the same value where `piece` lies.

    Added on the device as DeepSpeed does, in the gradient's dtype.
    """
    if not accumulate:
        staged.copy_(piece, non_blocking=True)
        return piece
    if piece.device.type == "cpu":
        return staged.add_(piece)
    value = staged.to(piece.device, non_blocking=True).add_(piece)
    staged.copy_(value, non_blocking=True)
    return value


def _key(shard: GradientShard, place: int) -> str:
    return f"{shard.name}.{place}"
