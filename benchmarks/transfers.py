"""What a phase of a training step moves, and nothing else: the least time of a drive for it.

In tiles, three of them in flight. The optimizer's are the transfers of memascend's tiled step in
their order: both halves of master weights, two states and gradients are read, all but the gradients
are written back; high halves are the parameters. No arithmetic, no Python of DeepSpeed's, nothing
that waits for a value. Knows the store alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from memascend.base.sizes import BOUNCE_BYTES
from memascend.memory.allocator import HostAllocator
from memascend.nvme.store import TensorStore, Ticket
from memascend.plan.knobs import TILE_COUNT, TILE_NUMEL

#: Bytes of each element, by key.
WRITTEN = {"low": 2, "high": 2, "exp_avg": 4, "exp_avg_sq": 4}
READ = WRITTEN | {"gradient": 2}
#: Forward and backward have a key of their own, so that a phase may read both.
ELEMENT_BYTES = READ | {"parameter": 2}


class Transfers:
    """Tensors of a model's training step on the drive. `run` moves them; `close` it."""

    def __init__(self, numel: int, directory: Path) -> None:
        """Writes all of it once.

        Args:
            numel: Parameters.
            directory: On the drive; a folder there is made, and goes with this object.
        """
        self._numel = numel
        self._stack = ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="memascend-bench-", dir=directory)
        path = Path(self._stack.enter_context(folder))
        allocator = HostAllocator()
        self._store = TensorStore(
            volumes=[path],
            bounce=allocator.tensor(BOUNCE_BYTES, torch.uint8, component="bench"),
        )
        self._stack.callback(self._store.close)
        self._tiles = [
            {
                key: allocator.tensor(TILE_NUMEL * size, torch.uint8, component="bench")
                for key, size in ELEMENT_BYTES.items()
            }
            for _ in range(TILE_COUNT)
        ]
        for key, size in ELEMENT_BYTES.items():
            self._store.reserve(key=key, nbytes=numel * size)
        for begin in self._begins():
            _wait(self._start("write", ELEMENT_BYTES, begin, self._tiles[0]))

    def run(self, read: Mapping[str, int] = READ, written: Mapping[str, int] = WRITTEN) -> None:
        """Moves what one phase moves: bytes of each element, by key."""
        begins = list(self._begins())
        reading: list[list[Ticket]] = []
        writing: list[list[Ticket]] = [[] for _ in range(TILE_COUNT)]
        for index in range(len(begins)):
            for ahead in range(len(reading), min(index + TILE_COUNT - 1, len(begins))):
                tile = ahead % TILE_COUNT
                _wait(writing[tile])
                reading.append(self._start("read", read, begins[ahead], self._tiles[tile]))
            tile = index % TILE_COUNT
            _wait(reading[index])
            writing[tile] = self._start("write", written, begins[index], self._tiles[tile])
        for tickets in writing:
            _wait(tickets)

    def stats(self) -> dict[str, int | float]:
        """The store's counters."""
        return self._store.stats()

    def close(self) -> None:
        """Gives everything back."""
        self._stack.close()

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begins(self) -> range:
        return range(0, self._numel, TILE_NUMEL)

    def _start(
        self, kind: str, keys: Mapping[str, int], begin: int, tile: dict[str, torch.Tensor]
    ) -> list[Ticket]:
        count = min(TILE_NUMEL, self._numel - begin)
        tickets = []
        for key, size in keys.items():
            part = tile[key].narrow(0, 0, count * size)
            offset = begin * size
            if kind == "read":
                tickets.append(self._store.read(key=key, target=part, offset_bytes=offset))
            else:
                tickets.append(self._store.write(key=key, source=part, offset_bytes=offset))
        return tickets


def _wait(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.wait()
