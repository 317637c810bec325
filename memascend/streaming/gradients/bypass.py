"""Gradients that need no drive: they are copied into the memory of a tile that waits for them.

A tile that is stepped during backward consumes its gradients, so no later step reads them. If the
step may turn out to be another one, they go to the drive too. Knows elements of tiles; not which
tiles are stepped early (streaming/optimizer/during_backward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DriveBypass:
    """Host memory for parts of one gradient, instead of the drive or beside it.

    Attributes:
        offset: The gradient's first element in the sub-group.
        tile_numel: Elements of a tile.
        find: `find(begin, count)` returns the tile's buffer for elements [begin, begin+count) of
            the sub-group, which lie in one tile; None: write them to the drive.
        is_kept: Whether all of the gradient goes to the drive, too.
        is_of_update: Whether an update takes the gradient's place, which is stored nowhere.
    """

    offset: int
    tile_numel: int
    find: Callable[[int, int], torch.Tensor | None]
    is_kept: bool = False
    is_of_update: bool = False

    def chunks(self, numel: int, numel_max: int) -> Iterator[tuple[int, int]]:
        """Cut the gradient into (begin, count) runs; each lies in one tile and fits a slot."""
        begin, end = self.offset, self.offset + numel
        while begin < end:
            following = (begin // self.tile_numel + 1) * self.tile_numel
            count = min(following, end, begin + numel_max) - begin
            yield begin - self.offset, count
            begin += count
