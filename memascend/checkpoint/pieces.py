"""A tensor that is put together from pieces of others while it is read.

Knows torch and the readers of checkpoint files; never DeepSpeed. Few files are open at a time,
however many the pieces are in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memascend.checkpoint.files import Reader

#: Of one tensor. Pieces that follow each other are in as many files as there were ranks.
OPEN_COUNT_MAX = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes that are together where they come from.

    Attributes:
        target: First byte in the tensor that is put together.
        nbytes: How many there are.
        reader: Where they come from.
        source: First byte there.
    """

    target: int
    nbytes: int
    reader: Reader
    source: int


class PieceReader:
    """Reads pieces as one tensor; what is in none of them is zero."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Takes segments in the order of their targets, none over another."""
        self._segments = [segment for segment in segments if segment.nbytes]
        self._begins = [segment.target for segment in self._segments]
        self._open: OrderedDict[int, Reader] = OrderedDict()

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fills a uint8 tensor in host memory with the bytes from `begin_bytes` on."""
        end = begin_bytes + target.numel()
        done = begin_bytes
        index = max(0, bisect_right(self._begins, begin_bytes) - 1)
        while index < len(self._segments) and (segment := self._segments[index]).target < end:
            first = max(segment.target, begin_bytes)
            until = min(segment.target + segment.nbytes, end)
            if first < until:
                target[done - begin_bytes : first - begin_bytes].zero_()
                piece = target[first - begin_bytes : until - begin_bytes]
                self._use(segment.reader).fill(segment.source + first - segment.target, piece)
                done = until
            index += 1
        target[done - begin_bytes :].zero_()

    def close(self) -> None:
        """Closes whatever this has opened; reading on opens it again."""
        while self._open:
            self._open.popitem()[1].close()

    def _use(self, reader: Reader) -> Reader:
        self._open[id(reader)] = reader
        self._open.move_to_end(id(reader))
        if len(self._open) > OPEN_COUNT_MAX:
            self._open.popitem(last=False)[1].close()
        return reader


class LazyReader:
    """A reader that is opened when it is read, and can be closed and read again."""

    def __init__(self, opens: Callable[[], Reader]) -> None:
        """Opens nothing yet."""
        self._opens = opens
        self._reader: Reader | None = None

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fills a uint8 tensor in host memory with the bytes from `begin_bytes` on."""
        if self._reader is None:
            self._reader = self._opens()
        self._reader.fill(begin_bytes, target)

    def close(self) -> None:
        """Closes it, if it is open."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
