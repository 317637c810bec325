"""Tiles: the fixed memory of the optimizer step, and the transfers in flight on it.

A tile owns its memory, and each of its reads and writes keeps it. So a tile that Ctrl-C leaves
without a reference gives its memory back, as a spare block does. Knows torch and the store; neither
the optimizer nor the source of gradients. One thread at a time may call, except where noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from memascend.base.components import OPTIMIZER_SCRATCH, OPTIMIZER_TILES
from memascend.base.interfaces import Event, HostMemory, TensorIO, Ticket
from memascend.base.sizes import casts
from memascend.base.units import page_up
from memascend.base.waiting import CopyTicket, event_here
from memascend.kernels.codes import scale_count
from memascend.kernels.halves import flag_bytes
from memascend.memory.pool import Lease, Pool
from memascend.streaming.optimizer.sub_group import is_code
from memascend.transfer.pending import Pending
from memascend.transfer.slots import Slots


@dataclass(frozen=True, slots=True)
class TileShape:
    """Contents of one tile, and the number of tiles.

    Attributes:
        numel: Elements; a multiple of `memascend.plan.knobs.TILE_NUMEL_STEP`.
        count: Number of tiles.
        state_count: States per parameter (2 for Adam); blocks for more are added when they appear.
        master_dtype: Dtype of master weights, and of gradients in the step.
        state_dtype: Dtype of states.
        moments: Dtypes of Adam's two moments by name, if one of them is in codes; else empty.
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
    moments: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def coded(self) -> tuple[str, ...]:
        """States in codes, in the order of their scales."""
        return tuple(name for name, dtype in self.moments.items() if is_code(dtype))


@dataclass(slots=True, eq=False)
class Tile:
    """Memory of one tile, the range it serves, and the transfers in flight on it."""

    owner: str
    begin: int
    numel: int
    memory: torch.Tensor  # the bytes of the blocks below; owns the slot
    master: torch.Tensor
    raw: torch.Tensor  # gradients in their stored dtype
    cast: torch.Tensor | None  # parameters in their own dtype
    states: list[torch.Tensor]
    scales: torch.Tensor  # of states in codes, side by side; may be empty
    transfers: Pending[Ticket] = field(default_factory=Pending)

    def low(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the low bits of master weights, in the block of whole ones."""
        return self.master.view(dtype).narrow(0, 0, self.numel)

    @property
    def high(self) -> torch.Tensor:
        """Their high halves, in the block of parameters, which must be in bf16."""
        assert self.cast is not None
        return self.cast.narrow(0, 0, self.numel)

    @property
    def flags(self) -> torch.Tensor:
        """Flags of low bits, as bits, in the block of the first state.

        Sub-groups whose flags are bits have no state in tiles.
        """
        return self.states[0].view(torch.uint8).narrow(0, 0, flag_bytes(self.numel))

    @property
    def joined(self) -> torch.Tensor:
        """The half of the block of whole weights that low bits leave."""
        numel = self.master.numel()
        return self.master.narrow(0, numel // 2, numel - numel // 2)

    def add(self, ticket: Ticket) -> None:
        """Note a transfer in flight on it."""
        self.transfers.add(ticket, ticket)


class TileMemory:
    """All tiles: idle, taken by the caller, or retired with transfers in flight.

    A tile's slot has the planned blocks. Blocks for more states stay with the slot.
    """

    def __init__(
        self,
        *,
        store: TensorIO,
        memory: HostMemory,
        shape: TileShape,
        new_event: Callable[[], Event] | None = None,
        wait_idle: Callable[[], object] | None = None,
    ) -> None:
        """Take the memory of all tiles now.

        Args:
            store: Source and destination of their contents.
            memory: Page-locked host memory.
            shape: Contents and number of tiles.
            new_event: Makes an event of the device; None when the device is the CPU.
            wait_idle: Waits until the device is idle; None when it is the CPU.
        """
        self._store = store
        self._new_event = new_event
        self._memory = memory
        self.shape = shape
        self._has_output = casts(shape.parameter_dtype, shape.master_dtype)
        output = [shape.parameter_dtype] * self._has_output
        states = list(shape.moments.values()) or [shape.state_dtype] * shape.state_count
        self._dtypes = [shape.master_dtype, shape.gradient_dtype, *output, *states]
        self._block_sizes = list(map(self._block_bytes, self._dtypes))
        self._dtypes.append(torch.float32)
        scales = scale_count(shape.numel) * len(shape.coded)
        self._block_sizes.append(page_up(scales * torch.float32.itemsize))
        self._tile_bytes = sum(self._block_sizes)
        slots = Slots(memory=memory, component=OPTIMIZER_TILES, wait_idle=wait_idle)
        slots.resize(slot_bytes=self._tile_bytes, slot_count=shape.count)
        self._slots = slots
        self._more_states: dict[int, list[torch.Tensor]] = {}  # by address of the slot
        # Without `self`: in a reference cycle the memory would wait for the garbage collector.
        self._retired: Pending[Tile] = Pending(lambda tile: slots.free(tile.memory))
        spare_bytes = self._block_bytes(shape.gradient_dtype)
        self._spares = Pool(memory=memory, component=OPTIMIZER_TILES, budget_bytes=0)
        self._spares.resize(
            spare_bytes * shape.spare_count, slot_bytes_max=spare_bytes, segment_bytes=spare_bytes
        )
        self.nbytes = shape.count * self._tile_bytes + self._spares.held_bytes  # of host memory
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
        while not self.has_idle():
            if self._retired:
                self._retired.wait_oldest()
                continue
            self._store.wait_all()  # for transfers on tiles that Ctrl-C left without a reference
            if not self.has_idle():
                raise AssertionError("every tile is taken and none was retired")
        memory = self._slots.cut(self._tile_bytes, torch.uint8)
        parts = memory.split_with_sizes(self._block_sizes)
        master, raw, *others, scales = (
            part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True)
        )
        return Tile(
            owner=owner,
            begin=begin,
            numel=min(self.shape.numel, numel - begin),
            memory=memory,
            master=master,
            raw=raw,
            cast=others.pop(0) if self._has_output else None,
            states=others + self._more_states.get(memory.data_ptr(), []),
            scales=scales,
        )

    def has_idle(self) -> bool:
        """Return whether `take` would not wait for the drive."""
        self._retired.release_done()
        self._slots.recover()
        return self._slots.free_count > 0

    def has_retired(self) -> bool:
        """Return whether there are retired tiles, so that `take` would only wait for transfers."""
        return bool(self._retired)

    def retire(self, tile: Tile) -> None:
        """Give a tile back; it is idle again when its transfers are over."""
        self._retired.add(tile.transfers, tile)

    def drain(self) -> None:
        """Wait until nothing is in flight on retired tiles.

        Raises:
            StoreError: A transfer failed; the others have been waited for.
        """
        self._retired.wait()

    def read(self, tile: Tile, key: str, target: torch.Tensor) -> None:
        """Start reading the tile's range of a key into one of its blocks."""
        part = target.narrow(0, 0, tile.numel)
        self.read_part(tile, key, part, tile.begin * target.element_size())

    def read_part(self, tile: Tile, key: str, target: torch.Tensor, offset_bytes: int) -> None:
        """Start reading from any key and offset into memory of the tile."""
        tile.add(
            self._store.read(key=key, target=target, offset_bytes=offset_bytes, hold=tile.memory)
        )

    def write(self, tile: Tile, key: str, source: torch.Tensor) -> None:
        """Start writing one of the tile's blocks to its range of a key."""
        part = source.narrow(0, 0, tile.numel)
        self.write_part(tile, key, part, tile.begin * source.element_size())

    def write_part(self, tile: Tile, key: str, source: torch.Tensor, offset_bytes: int) -> None:
        """Start writing memory of the tile to any key and offset."""
        tile.add(
            self._store.write(key=key, source=source, offset_bytes=offset_bytes, hold=tile.memory)
        )

    def read_scales(self, tile: Tile, key: str) -> None:
        """Start reading the scales of the tile's range."""
        self.read_part(tile, key, *self._scales(tile))

    def write_scales(self, tile: Tile, key: str) -> None:
        """Start writing the scales of the tile's range."""
        self.write_part(tile, key, *self._scales(tile))

    def scales(self, tile: Tile) -> torch.Tensor:
        """Return the scales of the tile's range."""
        return self._scales(tile)[0]

    def _scales(self, tile: Tile) -> tuple[torch.Tensor, int]:
        """Return the scales of the tile's range, and their offset in bytes in their key."""
        kinds = len(self.shape.coded)
        part = tile.scales.narrow(0, 0, scale_count(tile.numel) * kinds)
        return part, scale_count(tile.begin) * kinds * part.itemsize

    def copy_part(self, tile: Tile, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start copying memory of the tile to a tensor of any device, in stream order."""
        target.copy_(source, non_blocking=True)
        event = None if target.device.type == "cpu" else event_here(self._new_event)
        if event is not None:
            tile.add(CopyTicket(event))

    def wait_copies(self) -> None:
        """Wait until copies from retired tiles are over, for readers on any stream."""
        for tile in self._retired:
            for ticket in tile.transfers:
                if isinstance(ticket, CopyTicket):
                    ticket.wait()

    def state(self, tile: Tile, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the block of the tile's n-th state as `dtype`, as long as the tile's range."""
        while len(tile.states) <= number:
            block = self._block(self.shape.state_dtype)
            self._more_states.setdefault(tile.memory.data_ptr(), []).append(block)
            tile.states.append(block)
        block = tile.states[number]
        return (block if block.dtype == dtype else block.view(dtype)).narrow(0, 0, tile.numel)

    def gradient(self, tile: Tile) -> torch.Tensor:
        """Return the block for the tile's gradients in the step's dtype.

        It is shared by all tiles if gradients are stored in another dtype, else the tile's own.
        """
        block = tile.raw if self._scratch is None else self._scratch
        return block.narrow(0, 0, tile.numel)

    def acquire_spare(self) -> Lease | None:
        """Lease a block for gradients that arrive before their tile; None when all are leased.

        Beside `take`, another thread may call. Any thread may release the lease.
        """
        return self._spares.acquire(self._block_bytes(self.shape.gradient_dtype))

    def _block(self, dtype: torch.dtype, component: str = OPTIMIZER_TILES) -> torch.Tensor:
        self.nbytes += self._block_bytes(dtype)
        return self._memory.tensor(self.shape.numel, dtype, component=component)

    def _block_bytes(self, dtype: torch.dtype) -> int:
        return self.shape.numel * dtype.itemsize
