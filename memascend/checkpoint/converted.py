"""Converts a checkpoint's tensor to another dtype while it is read.

Knows torch and the readers of checkpoint files; never DeepSpeed. Widened values are exact, narrowed
ones rounded to nearest even. Only a piece of the tensor is in memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memascend.checkpoint.files import Reader
from memascend.checkpoint.source import LoadedTensor

#: Elements that are converted at a time.
CHUNK_NUMEL = 1 << 18


class ConvertedReader:
    """The bytes of a tensor in another dtype."""

    def __init__(self, reader: Reader, *, saved: torch.dtype, wanted: torch.dtype) -> None:
        self._reader = reader
        self._saved, self._wanted = saved, wanted
        self._piece: torch.Tensor | None = None

    def fill(self, begin_bytes: int, target: torch.Tensor) -> None:
        """Fill a uint8 tensor with the converted bytes from `begin_bytes` on, in whole elements."""
        if self._piece is None:
            self._piece = torch.empty(CHUNK_NUMEL, dtype=self._saved, device="cpu")
        values = target.view(self._wanted)
        first = begin_bytes // self._wanted.itemsize
        for begin in range(0, values.numel(), CHUNK_NUMEL):
            part = values[begin : begin + CHUNK_NUMEL]
            piece = self._piece[: part.numel()]
            offset = (first + begin) * self._saved.itemsize
            self._reader.fill(offset, piece.view(torch.uint8))
            part.copy_(piece)

    def close(self) -> None:
        """Release file, pages and memory; the next `fill` takes them again."""
        self._piece = None
        self._reader.close()


def converted(tensor: LoadedTensor, wanted: torch.dtype) -> LoadedTensor:
    """Return a checkpoint's tensor converted to `wanted`; unchanged if it has that dtype."""
    if tensor.dtype == wanted:
        return tensor
    reader = ConvertedReader(tensor.reader, saved=tensor.dtype, wanted=wanted)
    return replace(tensor, dtype=wanted, reader=reader)


def rounded(tensor: LoadedTensor, dtype: torch.dtype) -> LoadedTensor:
    """Return a checkpoint's tensor in its own dtype, with values rounded to those of another."""
    return converted(converted(tensor, dtype), tensor.dtype)
