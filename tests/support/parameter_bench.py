"""The parameter stream within a byte budget, over a store that is a dict."""

from __future__ import annotations

from typing import Any

import torch

from memascend.base.units import PAGE_BYTES
from memascend.memory.pool import Pool
from memascend.nvme.resident import ResidentStore
from memascend.streaming.background import BackgroundStep
from memascend.streaming.parameters.shard import Shard, ShardState
from memascend.streaming.parameters.stream import ParameterStream
from memascend.transfer.staging import StagingSlots
from tests.support.streaming_fakes import FakeMemory, FakeStore, LateDevice

BUDGET_BYTES = 16 * PAGE_BYTES
LARGEST = BUDGET_BYTES // 4 // 4  # elements of float32 in the largest slot
PAGE = PAGE_BYTES // 4  # elements in a page


class Bench:
    """A stream within a budget; the store is a dict and staging slots are small."""

    def __init__(
        self,
        *,
        prefetch_bytes: int | None = None,
        device: LateDevice | None = None,
        pool: Pool | None = None,
        lender: ResidentStore | None = None,
        background: BackgroundStep | None = None,
    ) -> None:
        self.store: Any = lender or FakeStore()
        self.memory = FakeMemory()
        self.pool = pool or make_pool(self.memory)
        self.stream = ParameterStream(
            store=self.store,
            pool=self.pool,
            prefetch_bytes=prefetch_bytes,
            staging=StagingSlots(
                store=self.store,
                memory=FakeMemory(),
                slot_bytes=PAGE_BYTES,
                slot_count=3,
                new_event=None if device is None else device.new_event,
            ),
            device=torch.device("cpu"),
            background=background,
            lender=lender,
        )

    def put(self, key: str, content: torch.Tensor) -> Shard:
        if isinstance(self.store, FakeStore):
            self.store.content[key] = content.view(torch.uint8).clone()
        else:
            self.store.write(key=key, source=content).wait()
        return self.stream.shard(key, content.numel(), content.dtype)

    def new(self, key: str, numel: int = PAGE) -> tuple[Shard, torch.Tensor]:
        content = torch.randn(numel)
        return self.put(key, content), content

    def fetch(self, shard: Shard) -> torch.Tensor:
        self.stream.read_now([shard])
        assert shard.state in (ShardState.ARRIVED, ShardState.LENT)
        assert shard.tensor is not None
        return shard.tensor


def make_pool(memory: FakeMemory) -> Pool:
    return Pool(memory=memory, component="slots", budget_bytes=BUDGET_BYTES)
