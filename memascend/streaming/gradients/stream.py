"""The gradient path: from the device through staging slots to the drive, and back for the step.

Knows torch, the store and the slots; never DeepSpeed. Replaces a flat host buffer of all gradients
and keeps its meaning to the last bit, stale values included: as under CPU offload, a shard that got
no gradient for a step still holds the value that the last step left, zero at first.

A shard's gradient has at most two values. `latest` is the sum over the micro-steps of the current
window. `seen` is the input of the next optimizer step: the sum of the last window in whose final
micro-step the shard got a gradient. They differ only during a window (or if the shard gets no
gradient in the final micro-step). A shard has two places on the drive; a partial sum goes to the
place that does not hold `seen`. Summands may wait in places of their own (accumulation.py). The sum
of squares is computed while the chunks pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import torch

from memascend.base.interfaces import TensorIO, Ticket
from memascend.errors import GradientGoneError
from memascend.memory.guard import guarded
from memascend.streaming.gradients.accumulation import (
    SET_PLACE,
    SUM_PLACES,
    WINDOW_PLACES,
    Factor,
    GradientShard,
    SeenPart,
    StoredGradient,
    Window,
    zero_between,
)
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.transfer.staging import StagingSlots

#: A shard without a new gradient is multiplied by the factor of every step; after this many factors
#: the product is written back.
FACTOR_COUNT_MAX = 8

#: Called with `key`, `nbytes`, `over` and `before`: `key` is about to be written, `over` is needed
#: less from now on. A store that keeps some keys in memory gives `key` the memory of `over`, and
#: calls `before` first.
GiveMemory = Callable[..., None]
#: `memascend.kernels.overflow.sum_of_squares`, with its options chosen.
SumOfSquares = Callable[[torch.Tensor], torch.Tensor]


class GradientStream:
    """Gradients by sub-group and offset. One thread at a time may call, which `guard` checks.

    Calls that use no slots may be made by the step in the background without the lock. The thread
    that stores gradients calls `put` without it, and holds it while it uses slots or the store.
    """

    def __init__(
        self,
        *,
        store: TensorIO,
        slots: StagingSlots,
        sum_of_squares: SumOfSquares | None = None,
        give_memory_to: GiveMemory | None = None,
        memory_of: Callable[..., int] | None = None,
    ) -> None:
        """Make an empty gradient stream: every gradient reads as zero.

        Args:
            store: Stores the gradients.
            slots: The staging slots that they pass through.
            sum_of_squares: None when no norms are needed.
            give_memory_to: None when the store keeps no keys in memory.
            memory_of: Returns the bytes of `key` that the store keeps in memory; None likewise.
        """
        self._store = store
        self._slots = slots
        self.guard = slots.guard
        self._sum_of_squares = sum_of_squares
        self._give_memory_to = give_memory_to
        self._memory_of = memory_of
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
        arrived: torch.dtype | None = None,
        result: torch.Tensor | None = None,
        bypass: DriveBypass | None = None,
        squares: torch.Tensor | None = None,
    ) -> GradientShard:
        """Take the gradient of one shard; it may be overwritten on return, in stream order.

        Args:
            group: Name of the sub-group.
            offset: First element of the shard in it.
            gradient: 1-D, on any device, in the dtype of sums.
            accumulate: Add to the latest value instead of replacing it.
            final: The next step sees the result; else only after `make_final`.
            arrived: A narrower dtype that represents `gradient` exactly, if there is one: in this
                dtype it may wait on the drive to be added.
            result: Filled with the new value, if given; on any device, of any dtype.
            bypass: Host memory of tiles for parts of a final gradient, instead of the drive.
            squares: `squares_of` a gradient that replaces the latest value, if known.

        Raises:
            StoreError: The drive failed.
            StoreFullError: The drive is full.
            GradientGoneError: The latest value, to be added to, was given to tiles.
        """
        shard = self._shard(group, offset)
        window = shard.window if accumulate else None
        if accumulate and window is None and shard.is_used_up:
            raise GradientGoneError("cannot add another backward pass to the one before")
        if window is None:
            numel, dtype, device = gradient.numel(), gradient.dtype, gradient.device
            window = Window(not accumulate, numel, dtype, device)
        if final or result is not None:
            arrived = None  # the sum is needed now
        if arrived is None or not self._append(shard, window, gradient, arrived):
            if result is None and window.is_replaced_by(gradient):
                self._replace(shard, window, gradient, squares, final=final, bypass=bypass)
            else:
                with self._slots.turn(0):
                    self._add_up(shard, window, gradient, final=final, result=result, bypass=bypass)
        return shard

    def squares_of(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of squares of a gradient, 0-dim; None if no norms are needed."""
        squares: torch.Tensor | None = None
        for begin, count in self._slots.chunks(gradient.numel(), gradient.element_size()):
            squares = self._add_squares(squares, gradient.narrow(0, begin, count))
        return squares

    @guarded
    def make_final(self, group: str, offset: int) -> None:
        """Make the latest value of a shard the one that the next step sees."""
        shard = self._shards[group][offset]
        if shard.window is not None:
            self._add_up(shard, shard.window, final=True)
        else:
            self._see(shard, shard.latest)

    def find(self, group: str, offset: int) -> GradientShard | None:
        """Return the shard at an offset; None when it never got a gradient."""
        return self._shards.get(group, {}).get(offset)

    @guarded
    def sum_of_squares(self) -> torch.Tensor:
        """Return the sum over all latest values, 0-dim; finite if and only if every element is."""
        total = torch.zeros((), dtype=torch.float64)
        for shards in self._shards.values():
            for shard in shards.values():
                if shard.window is not None:
                    self._add_up(shard, shard.window, final=False)
                if shard.squares is not None:
                    total = total.to(shard.squares) + shard.squares
        return total

    # -- the step --------------------------------------------------------------------------------

    @guarded
    def submit(self) -> None:
        """Submit all gradients that were put to the store, so that `start_read` sees them."""
        self._slots.submit_all()

    def needs_slots(self, dtype: torch.dtype) -> bool:
        """Return whether a step on gradients stored in `dtype` passes values through slots."""
        return any(
            len(shard.factors) >= FACTOR_COUNT_MAX or shard.seen.dtype != dtype
            for shards in self._shards.values()
            for shard in shards.values()
            if shard.seen is not None
        )

    def start_read(
        self, group: str, begin: int, raw: torch.Tensor, hold: object | None = None
    ) -> list[Ticket]:
        """Start reading a range as it is stored; call `convert` once the tickets are done.

        Call `submit` first. Values of another dtype than `raw` are left to `convert`. The owner of
        the memory, `hold`, is kept until the reads are over.
        """
        return [
            self._store.read(
                key=part.value.key,
                target=raw.narrow(0, part.begin, part.count),
                offset_bytes=part.offset_bytes,
                hold=hold,
            )
            for part in self._seen_in(group, begin, raw.numel())
            if part.value.dtype == raw.dtype
        ]

    def complete(self, group: str, begin: int, raw: torch.Tensor) -> bool:
        """Complete the gradient in `raw` after `start_read`, if only zeros are missing.

        Returns:
            False if `convert` is needed: a value has another dtype, or is to be multiplied.
        """
        parts = list(self._seen_in(group, begin, raw.numel()))
        if any(part.shard.factors or part.value.dtype != raw.dtype for part in parts):
            return False
        zero_between(parts, raw)
        return True

    def convert(self, group: str, begin: int, raw: torch.Tensor, gradient: torch.Tensor) -> None:
        """Fill `gradient` from `raw`, after `start_read`; `gradient` may be `raw` itself."""
        parts = list(self._seen_in(group, begin, raw.numel()))
        zero_between(parts, gradient)
        for part in parts:
            target = gradient.narrow(0, part.begin, part.count)
            if part.value.dtype != raw.dtype:
                self._read(part, target)
            elif gradient.data_ptr() != raw.data_ptr():
                target.copy_(raw.narrow(0, part.begin, part.count))
            for factor in part.shard.factors:
                target.mul_(factor)

    def note_factor(self, group: str, factor: Factor, dtype: torch.dtype) -> None:
        """Record that a step has multiplied every gradient of a sub-group.

        Args:
            group: Name of the sub-group.
            factor: The argument of `mul_`.
            dtype: The step's dtype, in which a product of many factors is stored.
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

    @guarded
    def get(self, group: str, begin: int, target: torch.Tensor) -> None:
        """Fill a host tensor with the gradients of a range as the next step would see them.

        Raises:
            GradientGoneError: Tiles were given a part of it, or it was replaced.
        """
        shard = self.find(group, begin)
        if shard is not None and shard.is_replaced:
            raise GradientGoneError.of_update()
        target.zero_()
        for part in self._seen_in(group, begin, target.numel()):
            if part.shard.bypassed or part.value.is_update:
                raise GradientGoneError("cannot read a gradient")
            values = target.narrow(0, part.begin, part.count)
            self._read(part, values)
            for factor in part.shard.factors:
                values.mul_(factor)

    @guarded
    def set(self, group: str, offset: int, value: torch.Tensor) -> None:
        """Replace the gradient that the next step sees at `offset`, in the dtype of `value`."""
        shard = self._shard(group, offset)
        target = self._reserve(shard, SET_PLACE, value.numel(), value.dtype)
        self._slots.write(key=target.key, source=value)
        self._see(shard, target)

    def note_replaced(self, group: str, offset: int) -> None:
        """Note that the next step sees an update here, which is not on the drive."""
        self._shard(group, offset).is_replaced = True

    def bypassed(self, group: str) -> Iterator[tuple[int, int]]:
        """Yield (offset of the shard, first element) of each part that tiles were given."""
        for offset, shard in self._shards.get(group, {}).items():
            yield from ((offset, begin) for begin, _ in shard.bypassed)

    @guarded
    def put_back(self, group: str, offset: int, begin: int, part: torch.Tensor) -> None:
        """Store a part of the shard at `offset` that a tile was given and did not use."""
        shard, found = self._shards[group][offset], (begin, part.numel())
        if shard.seen is not None and found in shard.bypassed:  # the whole shard arrived
            offset_bytes = (begin - offset) * part.element_size()
            self._slots.write(key=shard.seen.key, source=part, offset_bytes=offset_bytes)
            shard.bypassed.remove(found)  # behind the write: Ctrl-C in it leaves the part missing

    @guarded
    def discard(self) -> None:
        """Drop every gradient, and free its space on the drive."""
        self._slots.wait_writes()
        for shards in self._shards.values():
            for shard in shards.values():
                for place in (*SUM_PLACES, SET_PLACE, *WINDOW_PLACES):
                    self._store.discard(key=shard.key(place))
        self._shards.clear()

    # -- inner -----------------------------------------------------------------------------------

    def _shard(self, group: str, offset: int) -> GradientShard:
        new = GradientShard(name=f"gradient.{group}.{offset}", offset=offset)
        return self._shards.setdefault(group, {}).setdefault(offset, new)

    def _seen_in(self, group: str, begin: int, count: int) -> Iterator[SeenPart]:
        """Yield the parts of seen values in a range of a sub-group, in any order."""
        for shard in self._shards.get(group, {}).values():
            value = shard.seen
            if value is None:
                continue
            first = max(begin, shard.offset)
            last = min(begin + count, shard.offset + value.numel)
            if first < last:
                yield SeenPart(shard, value, first - begin, last - first, first - shard.offset)

    def _append(
        self, shard: GradientShard, window: Window, gradient: torch.Tensor, arrived: torch.dtype
    ) -> bool:
        """Append a gradient to the window on the drive; return False to add it up now."""
        if len(window.gradients) == len(WINDOW_PLACES):
            return False
        # Reserve the sum now: a full drive is an error in this micro-step, not in a later one.
        with self._slots.turn(0):
            target = self._target(shard, window, final=True, anew=False)
            if self._memory_of is not None and self._memory_of(key=target.key) >= gradient.nbytes:
                return False  # the sum is in memory: adding causes no traffic
            place = WINDOW_PLACES[len(window.gradients)]
            stored = self._reserve(shard, place, window.numel, arrived)
        for begin, count in self._slots.chunks(window.numel, arrived.itemsize):
            self._write(stored, begin, gradient.narrow(0, begin, count))
        window.gradients.append(stored)
        shard.window = window
        return True

    def _replace(
        self,
        shard: GradientShard,
        window: Window,
        gradient: torch.Tensor,
        squares: torch.Tensor | None,
        *,
        final: bool,
        bypass: DriveBypass | None,
    ) -> None:
        """Store a gradient as a shard's latest value; nothing is added to it."""
        with self._slots.turn(0):
            target = self._target(shard, window, final=final, anew=True)
        target = replace(target, is_update=bypass is not None and bypass.is_of_update)
        bypassed = []
        total: torch.Tensor | None = None
        for begin, count in window.chunks(self._slots, bypass):
            first, piece = shard.offset + begin, gradient.narrow(0, begin, count)
            tile = None if bypass is None else bypass.find(first, count)
            if tile is not None:
                tile.copy_(piece, non_blocking=True)
            if tile is None or bypass is None or bypass.is_kept:
                self._write(target, begin, piece)
            else:
                bypassed.append((first, count))
            if squares is None:  # after the copy: the write need not wait for this
                total = self._add_squares(total, piece)
        self._note_latest(shard, target, total if squares is None else squares, final, bypassed)

    def _write(self, stored: StoredGradient, begin: int, piece: torch.Tensor) -> None:
        """Write elements that fit a slot, from `begin` on."""
        with self._slots.turn(piece.numel() * stored.dtype.itemsize):
            self._slots.write(
                key=stored.key,
                source=piece,
                offset_bytes=begin * stored.dtype.itemsize,
                dtype=stored.dtype,
            )

    def _add_squares(self, total: torch.Tensor | None, piece: torch.Tensor) -> torch.Tensor | None:
        if self._sum_of_squares is None:
            return None
        squares = self._sum_of_squares(piece)
        return squares if total is None else total + squares

    def _note_latest(
        self,
        shard: GradientShard,
        target: StoredGradient,
        squares: torch.Tensor | None,
        final: bool,
        bypassed: list[tuple[int, int]],
    ) -> None:
        shard.latest, shard.window, shard.squares = target, None, squares
        if final:
            with self._slots.turn(0):
                self._see(shard, target)
            shard.bypassed = bypassed

    def _add_up(
        self,
        shard: GradientShard,
        window: Window,
        last: torch.Tensor | None = None,
        *,
        final: bool,
        result: torch.Tensor | None = None,
        bypass: DriveBypass | None = None,
    ) -> None:
        """Store the sum of a shard's latest value, its window, and one more gradient."""
        anew = window.replaces or shard.latest is None
        target = self._target(shard, window, final=final, anew=anew)
        squares: torch.Tensor | None = None
        bypassed = []
        with closing(window.add_up(self._slots, shard.latest, last, bypass)) as chunks:
            for begin, staged, value in chunks:
                with self._slots.given_back_on_error(staged):
                    first, count = shard.offset + begin, staged.numel()
                    tile = None if bypass is None else bypass.find(first, count)
                    is_kept = tile is None or bypass is None or bypass.is_kept
                    if tile is not None:
                        tile.copy_(value, non_blocking=True)
                    if is_kept and value is not staged:
                        staged.copy_(value, non_blocking=True)
                    filled = self._slots.event_here()  # the write need not wait for work below
                    squares = self._add_squares(squares, value)
                    if result is not None:
                        result.narrow(0, begin, count).copy_(value)
                if is_kept:
                    self._slots.submit(target.key, staged, begin * target.dtype.itemsize, filled)
                else:
                    bypassed.append((first, count))
                    self._slots.give_back(staged)
        self._note_latest(shard, target, squares, final, bypassed)

    def _target(
        self, shard: GradientShard, like: Window, *, final: bool, anew: bool
    ) -> StoredGradient:
        """Reserve the place of a shard's next sum: it overwrites `seen` only if final."""
        free = list(SUM_PLACES)
        if not final and shard.seen is not None and shard.seen.place in free:
            free.remove(shard.seen.place)
        numel, dtype = like.numel, like.dtype
        if shard.latest is not None and shard.latest.place in free:
            return self._reserve(shard, shard.latest.place, numel, dtype, anew=anew)
        if shard.seen is not None and self._give_memory_to is not None:
            # The sum is read and written by every micro-step; `seen` is mostly not read again.
            new, seen = shard.key(free[0]), shard.seen.key
            self._give_memory_to(
                key=new,
                nbytes=numel * dtype.itemsize,
                over=seen,
                before=lambda: self._slots.submit_all(new, seen),
            )
        return self._reserve(shard, free[0], numel, dtype, anew=anew)

    def _reserve(
        self,
        shard: GradientShard,
        place: int,
        numel: int,
        dtype: torch.dtype,
        *,
        anew: bool = True,
    ) -> StoredGradient:
        key = shard.key(place)
        if anew and self._slots.take_failure(key):
            # The whole key is about to be written: discarding it clears the failed state.
            self._slots.submit_all(key)
            self._store.discard(key=key)
        self._store.reserve(key=key, nbytes=numel * dtype.itemsize)
        return StoredGradient(key=key, place=place, numel=numel, dtype=dtype)

    def _see(self, shard: GradientShard, value: StoredGradient | None) -> None:
        old, shard.seen = shard.seen, value
        shard.factors.clear()
        shard.is_replaced = False
        if value is not old:
            shard.bypassed = []
        if old is not None and old.place == SET_PLACE and (value is None or old.key != value.key):
            self._slots.submit_all(old.key)
            self._store.discard(key=old.key)

    def _multiply(self, shard: GradientShard, seen: StoredGradient, dtype: torch.dtype) -> None:
        """Store the product of the seen value and its factors, in the step's dtype."""
        key = shard.key(SET_PLACE)
        self._store.reserve(key=key, nbytes=seen.numel * dtype.itemsize)
        for begin, count in self._slots.chunks(seen.numel, dtype.itemsize):
            product = self._slots.take(count, dtype)
            with self._slots.given_back_on_error(product):
                self._read(SeenPart(shard, seen, 0, count, begin), product)
                for factor in shard.factors:
                    product.mul_(factor)
            self._slots.submit(key, product, begin * dtype.itemsize)
        self._see(shard, StoredGradient(key, SET_PLACE, seen.numel, dtype, seen.is_update))

    def _read(self, part: SeenPart, target: torch.Tensor) -> None:
        """Read a part chunk by chunk, converting to the target's dtype."""
        key, dtype = part.value.key, part.value.dtype
        self._slots.read(key=key, target=target, offset_bytes=part.offset_bytes, dtype=dtype)
