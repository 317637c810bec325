"""States in 8 bits, as fp32 numbers: decoded and encoded chunk by chunk, each in one staging slot.

Codes that are decoded and encoded again are the same, and so are their scales: fp32 files of a
checkpoint give a run its moments back. Knows the kernels, the slots and the store; not the forms of
sub-groups. One thread at a time may call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from memascend.base.interfaces import TensorIO, Ticket
from memascend.kernels.codes import SCALE_NUMEL, decode, encode, scale_count
from memascend.transfer.pending import Pending
from memascend.transfer.staging import StagingSlots

#: Chunks have a multiple of so many elements, so that codes of one are whole pages.
_NUMEL_STEP = 4096
#: Bytes of a scale's elements in a slot: fp32 values, codes, and two scales.
_SCALE_BYTES = SCALE_NUMEL * (4 + 1) + 2 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeKeys:
    """The keys of one state of a sub-group.

    Attributes:
        codes: Key of its codes.
        dtype: Their dtype.
        scales: Key of the scales of all states in codes, side by side.
        number: Place of the state among these.
        kinds: Number of these.
        numel: Elements of the sub-group.
    """

    codes: str
    dtype: torch.dtype
    scales: str
    number: int
    kinds: int
    numel: int


class _Chunk:
    """Codes from the first element of a scale on, and their values, in one slot."""

    def __init__(self, keys: CodeKeys, begin: int, numel: int, slot: torch.Tensor) -> None:
        self.begin, self.numel, self.slot = begin, numel, slot
        room = _numel_of(slot.numel())
        self.values = slot[: 4 * numel].view(torch.float32)
        self.codes = slot[4 * room : 4 * room + numel].view(keys.dtype)
        scales_bytes = 4 * scale_count(numel) * keys.kinds
        self.all_scales = slot[5 * room : 5 * room + scales_bytes].view(torch.float32)
        self.scales = self.all_scales[keys.number :: keys.kinds]
        self.transfers: Pending[Ticket] = Pending()

    def overlap(self, begin: int, numel: int) -> tuple[int, torch.Tensor]:
        """Return (first element, values) of the overlap with a range."""
        first = max(begin, self.begin)
        count = min(begin + numel, self.begin + self.numel) - first
        return first, self.values.narrow(0, first - self.begin, count)


class CodedStates:
    """Reads and writes states in codes, of any sub-group."""

    def __init__(self, *, store: TensorIO, slots: StagingSlots) -> None:
        """Take no slot yet."""
        self._store, self._slots = store, slots

    def decoded(
        self, keys: CodeKeys, begin: int, numel: int
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield (first element, fp32 values) of each chunk of a range; valid until the next.

        Close it, since chunks have slots.

        Raises:
            StoreError: A read failed.
        """
        for place in _chunks(keys, begin, numel, self._slots.slot_bytes):
            with self._taken(keys, place) as chunk:
                self._read(keys, chunk)
                yield chunk.overlap(begin, numel)

    def fill(
        self, keys: CodeKeys, begin: int, numel: int, source: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Replace a range, rounded to the nearest; on return it is in the store.

        Elements beside the range that share a scale with it are rounded once more, by its scale.

        Args:
            keys: The state. Codes may be without values if all of them are replaced.
            begin: First element.
            numel: Number of elements.
            source: Called with (first element in the range, fp32 tensor); fills the tensor.

        Raises:
            StoreError: A transfer failed.
        """
        for place in _chunks(keys, begin, numel, self._slots.slot_bytes):
            with self._taken(keys, place) as chunk:
                first, values = chunk.overlap(begin, numel)
                self._read(keys, chunk, is_replaced=values.numel() == chunk.numel)
                source(first - begin, values)
                encode(chunk.values, chunk.codes, chunk.scales)
                self._write(keys, chunk)

    # -- inner -----------------------------------------------------------------------------------

    @contextmanager
    def _taken(self, keys: CodeKeys, place: tuple[int, int]) -> Iterator[_Chunk]:
        """Take a slot for a chunk; no transfer on it is left when it is given back."""
        chunk = _Chunk(keys, *place, self._slots.take(self._slots.slot_bytes, torch.uint8))
        try:
            yield chunk
        except (Exception, GeneratorExit):  # after Ctrl-C a ticket may be lost
            with suppress(Exception):  # the first error is the one to raise
                chunk.transfers.wait()
            self._give_back(chunk)
            raise
        self._give_back(chunk)

    def _give_back(self, chunk: _Chunk) -> None:
        if not chunk.transfers:  # else the drive may still use the slot, and the store keeps it
            self._slots.give_back(chunk.slot)

    def _read(self, keys: CodeKeys, chunk: _Chunk, *, is_replaced: bool = False) -> None:
        """Read a chunk, and wait; of one that is replaced, scales of other states alone."""
        self._slots.submit_all()  # the store does not know of slots that wait for the device
        if not is_replaced or keys.kinds > 1:
            offset = _scales_offset(keys, chunk)
            self._start_read(chunk, keys.scales, chunk.all_scales, offset)
        if is_replaced:
            chunk.transfers.wait()
            return
        self._start_read(chunk, keys.codes, chunk.codes, chunk.begin)
        chunk.transfers.wait()
        decode(chunk.codes, chunk.scales, chunk.values)

    def _start_read(self, chunk: _Chunk, key: str, target: torch.Tensor, offset: int) -> None:
        ticket = self._store.read(key=key, target=target, offset_bytes=offset, hold=chunk.slot)
        chunk.transfers.add(ticket, ticket)

    def _write(self, keys: CodeKeys, chunk: _Chunk) -> None:
        parts = {keys.codes: (chunk.codes, chunk.begin)}
        parts[keys.scales] = chunk.all_scales, _scales_offset(keys, chunk)
        for key, (source, offset) in parts.items():
            ticket = self._store.write(key=key, source=source, offset_bytes=offset, hold=chunk.slot)
            chunk.transfers.add(ticket, ticket)
        chunk.transfers.wait()


def _scales_offset(keys: CodeKeys, chunk: _Chunk) -> int:
    return 4 * scale_count(chunk.begin) * keys.kinds


def _numel_of(slot_bytes: int) -> int:
    """Return the elements of a chunk."""
    numel = slot_bytes // _SCALE_BYTES * SCALE_NUMEL
    return numel // _NUMEL_STEP * _NUMEL_STEP or numel


def _chunks(keys: CodeKeys, begin: int, numel: int, slot_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (first element, elements) of chunks that cover a range and have whole scales."""
    step = _numel_of(slot_bytes)
    end = min(-(-(begin + numel) // SCALE_NUMEL) * SCALE_NUMEL, keys.numel)
    for first in range(begin // SCALE_NUMEL * SCALE_NUMEL, end, step):
        yield first, min(step, end - first)
