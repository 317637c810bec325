"""Fixtures of every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_shared_memory_left() -> Iterator[None]:
    """DeepSpeed's CPU collectives leave 66 MiB of shared memory per rank behind, for good.

    Ranks that still live have it mapped and do not need its name.
    """
    folder, pattern = Path("/dev/shm"), "deepspeed_allreduce_buffer_*"
    before = set(folder.glob(pattern))
    yield
    for path in set(folder.glob(pattern)) - before:
        path.unlink(missing_ok=True)
