"""Resident stores over a memory engine, and what is kept in them."""

from __future__ import annotations

import torch

from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import MemoryFaults
from tests.support.streaming_hosts import HostTensors, memory_store

STREAMS = ("one", "other")


def stream_of(key: str) -> str | None:
    """The stream of a key; None of one that never stays in memory."""
    stream = key.partition(".")[0]
    return stream if stream in STREAMS else None


def open_resident(
    faults: MemoryFaults | None = None, memory: HostTensors | None = None, **nbytes: int
) -> ResidentStore:
    """A store with so much memory for each stream, which keys name before their first dot."""
    store = ResidentStore(memory_store(faults), stream_of=stream_of)
    if nbytes:
        store.grant(nbytes, memory=memory or HostTensors(), component="resident cache")
    return store


def pattern(nbytes: int, seed: int = 1) -> torch.Tensor:
    """Bytes that tell their seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, generator=generator)


def content(store: ResidentStore, key: str) -> torch.Tensor:
    """All of a key."""
    target = torch.zeros(store.nbytes(key=key), dtype=torch.uint8)
    store.read(key=key, target=target).wait()
    return target
