"""Master weights in two parts: joined and cut chunk by chunk, each chunk in one staging slot.

A slot has room for both parts of a chunk, its flags and its fp32 weights. Knows the kernels, the
slots and the store; neither the forms of sub-groups nor the optimizer's arithmetic. One thread at a
time may call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

import torch

from memascend.base.interfaces import TensorIO, Ticket
from memascend.kernels.halves import flag_bytes
from memascend.streaming.optimizer.low_bits import HIGH_DTYPE, LowBits
from memascend.transfer.pending import Pending
from memascend.transfer.staging import StagingSlots

#: Chunks have a multiple of so many elements, so that each half of one is whole pages.
_NUMEL_STEP = 2048
#: Bytes of one element in a slot: two halves, a flag in fp32 at most, the weight.
_ELEMENT_BYTES = 2 + 2 + 4 + 4

#: A part of one source: key, offset of its first byte, elements, first element in the chunk.
Run = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfKeys:
    """The keys of one sub-group's master weights.

    Attributes:
        low_bits: Form of the low bits.
        low: Key of these; None while all are zero.
        high: Returns the runs of the high halves of (first element, elements).
        flags: Key of the second moments whose signs are flags, or of bits; None if the high halves
            were cut off, or no flag is set.
        flag_dtype: Dtype of these; uint8 of bits.
    """

    low_bits: LowBits
    low: str | None
    high: Callable[[int, int], Iterable[Run]]
    flags: str | None
    flag_dtype: torch.dtype

    def flag_place(self, begin: int, numel: int) -> tuple[int, int, int]:
        """Return (offset in bytes, elements, first bit in them) of the flags of a range."""
        if self.low_bits is not LowBits.BITS:
            return begin * self.flag_dtype.itemsize, numel, 0
        first_byte, first_bit = divmod(begin, 8)
        return first_byte, flag_bytes(first_bit + numel), first_bit


def _numel_of(slot_bytes: int) -> int:
    """Return the elements of a chunk."""
    numel = slot_bytes // _ELEMENT_BYTES
    return numel // _NUMEL_STEP * _NUMEL_STEP or numel


class _Chunk:
    """One chunk in its slot, and its transfers."""

    def __init__(self, begin: int, numel: int, slot: torch.Tensor, low_dtype: torch.dtype) -> None:
        self.begin, self.numel, self.slot = begin, numel, slot
        room = _numel_of(slot.numel())
        self.high = slot[: 2 * numel].view(HIGH_DTYPE)
        self.low = slot[2 * room : 2 * room + low_dtype.itemsize * numel].view(low_dtype)
        self._flags = slot[4 * room : 8 * room]
        self.weights = slot[8 * room : 8 * room + 4 * numel].view(torch.float32)
        self.transfers: Pending[Ticket] = Pending()

    def flags(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._flags[: numel * dtype.itemsize].view(dtype)

    def add(self, ticket: Ticket) -> None:
        self.transfers.add(ticket, ticket)


class Halves:
    """Joins and cuts the master weights of any sub-group."""

    def __init__(self, *, store: TensorIO, slots: StagingSlots) -> None:
        """Take no slot yet."""
        self._store, self._slots = store, slots

    def joined(
        self, keys: HalfKeys, begin: int, numel: int
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield (first element, fp32 weights) of each chunk; valid until the next.

        Close it, since chunks have slots.

        Raises:
            StoreError: A read failed.
        """
        with closing(self._read_each(keys, begin, numel)) as chunks:
            for chunk in chunks:
                yield chunk.begin, chunk.weights

    def write_high(self, keys: HalfKeys, numel: int, key: str) -> None:
        """Write high halves that tell all weights without flags to a reserved key; wait for it.

        Raises:
            StoreError: A transfer failed.
        """
        with closing(self._read_each(keys, 0, numel)) as chunks:
            for chunk in chunks:
                if keys.low_bits.has_flags:
                    keys.low_bits.cut(chunk.weights, chunk.high, chunk.low)
                self._write(chunk, [(key, chunk.high)], 0)
                chunk.transfers.wait()

    def fill(
        self,
        *,
        low_bits: LowBits,
        high: str,
        low: str,
        begin: int,
        numel: int,
        source: Callable[[int, torch.Tensor], None],
        rounded: Callable[[int, int], Iterable[Run]] | None = None,
    ) -> None:
        """Cut weights into two reserved keys; on return they are in the store.

        Args:
            low_bits: Form of the low bits.
            high: Key of high halves.
            low: Key of low bits.
            begin: First element in the keys.
            numel: Number of weights.
            source: Called with (first weight, fp32 tensor); fills the tensor.
            rounded: Returns the runs of (first element, elements) that get the weights, rounded to
                nearest even; None: none do.

        Raises:
            StoreError: A write failed.
        """
        writing: deque[_Chunk] = deque()
        try:
            for first, count in self._runs(numel):
                if len(writing) == 2:
                    self._end(writing.popleft())
                chunk = self._take(first, count, low_bits)
                writing.append(chunk)
                source(first, chunk.weights)
                low_bits.cut(chunk.weights, chunk.high, chunk.low)
                self._write(chunk, [(high, chunk.high), (low, chunk.low)], begin)
                if rounded is not None:
                    self._write_rounded(chunk, rounded(begin + first, count))
            while writing:
                self._end(writing.popleft())
        except Exception:
            self._drop(writing)
            raise

    # -- inner -----------------------------------------------------------------------------------

    def _read_each(self, keys: HalfKeys, begin: int, numel: int) -> Generator[_Chunk, None, None]:
        """Yield chunks with joined weights; one more is being read meanwhile."""
        self._slots.submit_all()  # the store does not know of slots that wait for the device
        coming: deque[_Chunk] = deque()
        try:
            for first, count in self._runs(numel):
                coming.append(self._take(begin + first, count, keys.low_bits))
                self._start_read(keys, coming[-1])
                if len(coming) == 2:
                    yield self._join(keys, coming[0])
                    self._end(coming.popleft())
            while coming:
                yield self._join(keys, coming[0])
                self._end(coming.popleft())
        except (Exception, GeneratorExit):
            self._drop(coming)
            raise

    def _start_read(self, keys: HalfKeys, chunk: _Chunk) -> None:
        read, begin = partial(self._store.read, hold=chunk.slot), chunk.begin
        if keys.low is None:
            chunk.low.zero_()
        else:
            offset = begin * keys.low_bits.dtype.itemsize
            chunk.add(read(key=keys.low, target=chunk.low, offset_bytes=offset))
        for key, offset, count, first in keys.high(begin, chunk.numel):
            target = chunk.high.narrow(0, first, count)
            chunk.add(read(key=key, target=target, offset_bytes=offset))
        if keys.flags is not None:
            offset, count, _ = keys.flag_place(begin, chunk.numel)
            flags = chunk.flags(keys.flag_dtype, count)
            chunk.add(read(key=keys.flags, target=flags, offset_bytes=offset))

    def _join(self, keys: HalfKeys, chunk: _Chunk) -> _Chunk:
        chunk.transfers.wait()
        flags = None
        _, count, first_flag = keys.flag_place(chunk.begin, chunk.numel)
        if keys.flags is not None:
            flags = chunk.flags(keys.flag_dtype, count)
        keys.low_bits.join(chunk.high, chunk.low, flags, chunk.weights, first_flag=first_flag)
        return chunk

    def _write(self, chunk: _Chunk, parts: Sequence[tuple[str, torch.Tensor]], begin: int) -> None:
        for key, source in parts:
            offset = (begin + chunk.begin) * source.element_size()
            chunk.add(
                self._store.write(key=key, source=source, offset_bytes=offset, hold=chunk.slot)
            )

    def _write_rounded(self, chunk: _Chunk, runs: Iterable[Run]) -> None:
        # No flag is read or written.
        values = chunk.flags(HIGH_DTYPE, chunk.numel).copy_(chunk.weights)
        for key, offset, count, first in runs:
            part = values.narrow(0, first, count)
            chunk.add(self._store.write(key=key, source=part, offset_bytes=offset, hold=chunk.slot))

    def _runs(self, numel: int) -> Iterator[tuple[int, int]]:
        step = _numel_of(self._slots.slot_bytes)
        return ((begin, min(step, numel - begin)) for begin in range(0, numel, step))

    def _take(self, begin: int, numel: int, low_bits: LowBits) -> _Chunk:
        slot = self._slots.take(self._slots.slot_bytes, torch.uint8)
        return _Chunk(begin, numel, slot, low_bits.dtype)

    def _end(self, chunk: _Chunk) -> None:
        try:
            chunk.transfers.wait()
        finally:
            if not chunk.transfers:  # else the drive may still use the slot, and the store keeps it
                self._slots.give_back(chunk.slot)

    def _drop(self, chunks: deque[_Chunk]) -> None:
        """Give slots back after an error, or when a caller stops early.

        Not after Ctrl-C: a transfer may have started whose ticket was lost.
        """
        while chunks:
            with suppress(Exception):  # the first error is the one to raise
                self._end(chunks.popleft())
