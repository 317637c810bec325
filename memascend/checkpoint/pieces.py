"""Assembles a tensor from pieces of others while it is read.

Knows torch and the readers of checkpoint files; never DeepSpeed. The number of files that are open
at a time is bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memascend.checkpoint.files import Reader

#: Files open for one tensor. Consecutive pieces are in as many files as there were ranks.
OPEN_COUNT_MAX = 32


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """A contiguous piece of a source."""

    target: int  # first byte in the assembled tensor
    nbytes: int
    reader: Reader
    source: int  # first byte in the source


class PieceReader:
    """Reads a tensor from pieces; bytes in no piece are zero."""

    def __init__(self, spans: Sequence[ByteSpan]) -> None:
        """Take spans in the order of their targets, without overlap."""
        self._spans = [span for span in spans if span.nbytes]
        self._begins = [span.target for span in self._spans]
        self._open: OrderedDict[int, Reader] = OrderedDict()

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fill a uint8 tensor in host memory with the bytes from `begin_bytes` on."""
        end = begin_bytes + target.numel()
        done = begin_bytes
        index = max(0, bisect_right(self._begins, begin_bytes) - 1)
        while index < len(self._spans) and (span := self._spans[index]).target < end:
            first = max(span.target, begin_bytes)
            until = min(span.target + span.nbytes, end)
            if first < until:
                target[done - begin_bytes : first - begin_bytes].zero_()
                piece = target[first - begin_bytes : until - begin_bytes]
                self._use(span.reader).fill(span.source + first - span.target, piece)
                done = until
            index += 1
        target[done - begin_bytes :].zero_()

    def close(self) -> None:
        """Close all readers in use; the next `fill` opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def _use(self, reader: Reader) -> Reader:
        self._open[id(reader)] = reader
        self._open.move_to_end(id(reader))
        if len(self._open) > OPEN_COUNT_MAX:
            self._open.popitem(last=False)[1].close()
        return reader
