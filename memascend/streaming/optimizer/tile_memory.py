"""Tiles: the fixed memory of the optimizer step, and the transfers in flight on it.

Knows torch and the store; neither the optimizer nor the source of gradients. One thread at a time
may call, except where noted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from memascend.base.components import OPTIMIZER_SCRATCH, OPTIMIZER_TILES
from memascend.base.interfaces import Event, HostMemory, TensorIO, Ticket
from memascend.base.sizes import casts
from memascend.base.waiting import CopyTicket, event_here, wait_all
from memascend.transfer.pending import Pending


@dataclass(frozen=True, slots=True)
class TileShape:
    """Contents of one tile, and the number of tiles.

    Attributes:
        numel: Elements; a multiple of `memascend.plan.knobs.TILE_NUMEL_STEP`.
        count: Number of tiles.
        state_count: States per parameter (2 for Adam); blocks for more are added when they appear.
        master_dtype: Dtype of master weights, and of gradients in the step.
        state_dtype: Dtype of states.
        gradient_dtype: Dtype of stored gradients.
        parameter_dtype: Dtype of the parameters.
        spare_count: Blocks beside the tiles, for gradients that arrive before their tile is read.
    """

    numel: int
    count: int
    state_count: int
    master_dtype: torch.dtype
    state_dtype: torch.dtype
    gradient_dtype: torch.dtype
    parameter_dtype: torch.dtype
    spare_count: int = 0


@dataclass(slots=True, eq=False)
class Tile:
    """Memory of one tile, the range it serves, and the transfers in flight on it."""

    master: torch.Tensor
    raw: torch.Tensor  # gradients in their stored dtype
    cast: torch.Tensor | None  # parameters in their own dtype
    states: list[torch.Tensor]
    tickets: list[Ticket] = field(default_factory=list)
    owner: str = ""
    begin: int = 0
    numel: int = 0

    def done(self) -> bool:
        """Return whether no transfer on it is in flight."""
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> None:
        """Wait for all transfers in flight on it, then raise the first error."""
        wait_all([self._finish_oldest] * len(self.tickets))

    def _finish_oldest(self) -> None:
        ticket = self.tickets[0]
        try:
            ticket.wait()
        finally:
            if ticket.done():  # else Ctrl-C ended the wait: the drive still uses the memory
                del self.tickets[0]


class TileMemory:
    """All tiles: idle, taken by the caller, or retired with transfers in flight."""

    def __init__(
        self,
        *,
        store: TensorIO,
        memory: HostMemory,
        shape: TileShape,
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        """Take the memory of all tiles now.

        Args:
            store: Source and destination of their contents.
            memory: Page-locked host memory.
            shape: Contents and number of tiles.
            new_event: Makes an event of the device; None when the device is the CPU.
        """
        self._store = store
        self._new_event = new_event
        self._memory = memory
        self.shape = shape
        self.nbytes = 0  # host memory of all tiles
        has_output = casts(shape.parameter_dtype, shape.master_dtype)
        self._idle: deque[Tile] = deque(
            Tile(
                master=self._block(shape.master_dtype),
                raw=self._block(shape.gradient_dtype),
                cast=self._block(shape.parameter_dtype) if has_output else None,
                states=[self._block(shape.state_dtype) for _ in range(shape.state_count)],
            )
            for _ in range(shape.count)
        )
        self._all = tuple(self._idle)
        self._retired: Pending[Tile] = Pending(self._idle.append)
        self._spare = deque(self._block(shape.gradient_dtype) for _ in range(shape.spare_count))
        self._scratch: torch.Tensor | None = None
        if casts(shape.gradient_dtype, shape.master_dtype):
            self._scratch = self._block(shape.master_dtype, OPTIMIZER_SCRATCH)

    def begins(self, numel: int) -> range:
        """Return the first element of each tile of a sub-group."""
        return range(0, numel, self.shape.numel)

    def take(self, owner: str, begin: int, numel: int) -> Tile:
        """Return an idle tile, or the oldest retired one once its writes are over.

        Raises:
            StoreError: One of those writes failed.
        """
        if not self.has_idle():
            self._retired.wait_oldest()
        tile = self._idle.popleft()
        tile.owner, tile.begin, tile.numel = owner, begin, min(self.shape.numel, numel - begin)
        return tile

    def has_idle(self) -> bool:
        """Return whether `take` would not wait."""
        self._retired.release_done()
        return bool(self._idle)

    def has_retired(self) -> bool:
        """Return whether there are retired tiles, so that `take` would only wait for transfers."""
        return bool(self._retired)

    def retire(self, tile: Tile) -> None:
        """Give a tile back; it is idle again when its transfers are over."""
        self._retired.add(tile, tile)

    def recover(self, held: Collection[Tile]) -> None:
        """Retire tiles that Ctrl-C left in no list.

        Args:
            held: Tiles that the caller has taken.
        """
        for tile in self._all:
            if tile not in self._idle and tile not in self._retired and tile not in held:
                self.retire(tile)

    def drain(self) -> None:
        """Wait until nothing is in flight on retired tiles.

        Raises:
            StoreError: A transfer failed; the others have been waited for.
        """
        self._retired.wait()

    def read(self, tile: Tile, key: str, target: torch.Tensor) -> None:
        """Start reading the tile's range of a key into one of its blocks."""
        part = target.narrow(0, 0, tile.numel)
        offset = tile.begin * target.element_size()
        tile.tickets.append(self._store.read(key=key, target=part, offset_bytes=offset))

    def write(self, tile: Tile, key: str, source: torch.Tensor) -> None:
        """Start writing one of the tile's blocks to its range of a key."""
        part = source.narrow(0, 0, tile.numel)
        self.write_part(tile, key, part, tile.begin * source.element_size())

    def write_part(self, tile: Tile, key: str, source: torch.Tensor, offset_bytes: int) -> None:
        """Start writing memory of the tile to any key and offset."""
        ticket = self._store.write(key=key, source=source, offset_bytes=offset_bytes)
        tile.tickets.append(ticket)

    def copy_part(self, tile: Tile, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start copying memory of the tile to a tensor of any device, in stream order."""
        target.copy_(source, non_blocking=True)
        event = None if target.device.type == "cpu" else event_here(self._new_event)
        if event is not None:
            tile.tickets.append(CopyTicket(event))

    def wait_copies(self) -> None:
        """Wait until copies from retired tiles are over, for readers on any stream."""
        for tile in self._retired:
            for ticket in tile.tickets:
                if isinstance(ticket, CopyTicket):
                    ticket.wait()

    def state(self, tile: Tile, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the block of the tile's n-th state as `dtype`, as long as the tile's range."""
        while len(tile.states) <= number:
            tile.states.append(self._block(self.shape.state_dtype))
        block = tile.states[number]
        return (block if block.dtype == dtype else block.view(dtype)).narrow(0, 0, tile.numel)

    def gradient(self, tile: Tile) -> torch.Tensor:
        """Return the block for the tile's gradients in the step's dtype.

        It is shared by all tiles if gradients are stored in another dtype, else the tile's own.
        """
        block = tile.raw if self._scratch is None else self._scratch
        return block.narrow(0, 0, tile.numel)

    # -- gradients that arrive before their tile: any thread may call ------------------------------

    def take_spare(self) -> torch.Tensor | None:
        """Return a spare block for the gradients of a tile; None when all are taken."""
        try:
            return self._spare.popleft()
        except IndexError:
            return None

    def give_spare(self, block: torch.Tensor) -> None:
        """Return a spare block."""
        self._spare.append(block)

    def exchange_gradient(self, tile: Tile, block: torch.Tensor) -> None:
        """Swap a spare block with the tile's gradient block; the latter becomes a spare."""
        block, tile.raw = tile.raw, block
        self.give_spare(block)

    def _block(self, dtype: torch.dtype, component: str = OPTIMIZER_TILES) -> torch.Tensor:
        self.nbytes += self.shape.numel * dtype.itemsize
        return self._memory.tensor(self.shape.numel, dtype, component=component)
