"""Parameters that DeepSpeed's own code partitions through our swapper. Needs DeepSpeed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import Init, NoGatherHandle, ZeroParamStatus

from memascend.base.units import PAGE_BYTES
from memascend.deepspeed.parameters.gather import wrap_partition
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.memory.pool import Pool
from memascend.nvme.resident import ResidentStore
from memascend.streaming.parameters.stream import ParameterStream
from memascend.transfer.staging import StagingSlots
from tests.support.streaming_fakes import FakeMemory, FakeStore

BUDGET_BYTES = 16 * PAGE_BYTES


class Rank:
    """One rank's zero.Init as far as partitioning needs it, over a budget."""

    def __init__(
        self, rank: int = 0, world: int = 1, *, resident: ResidentStore | None = None
    ) -> None:
        self.rank, self.world = rank, world
        self.store: Any = resident or FakeStore()
        self.pool = Pool(memory=FakeMemory(), component="slots", budget_bytes=BUDGET_BYTES)
        staging = StagingSlots(
            store=self.store, memory=FakeMemory(), slot_bytes=PAGE_BYTES, slot_count=3
        )
        self.param_swapper = ParameterSwapper(
            attachment=SimpleNamespace(host_buffers=nullcontext),  # type: ignore[arg-type]
            stream=ParameterStream(
                store=self.store,
                pool=self.pool,
                staging=staging,
                device=torch.device("cpu"),
                lender=resident,
            ),
            dtype=torch.bfloat16,
        )
        self.remote_device = OffloadDeviceEnum.nvme
        self.params: list[Any] = []

    # What Init._partition_param calls on itself.
    def _aligned_size(self, param: Any) -> int:
        return -(-int(param.ds_numel) // self.world) * self.world

    def _partition_world_size(self, param: Any) -> int:
        return self.world

    def _partition_rank(self, param: Any) -> int:
        return self.rank

    def parameter(self, content: torch.Tensor) -> Any:
        param: Any = torch.nn.Parameter(content.clone())
        param.ds_id = len(self.params)
        param.ds_shape, param.ds_numel = param.shape, param.numel()
        param.ds_status = ZeroParamStatus.AVAILABLE
        param.ds_tensor, param.ds_persist = None, False
        param.ds_active_sub_modules = set()
        param.ds_zero_partition_rank = self.rank
        param.nvme_swapper = self.param_swapper
        self.params.append(param)
        return param

    def partition(self, param: Any, *, updated: bool = False) -> None:
        wrap_partition(Init._partition_param)(self, param, has_been_updated=updated)
        param.ds_status = ZeroParamStatus.NOT_AVAILABLE

    def shard(self, param: Any) -> torch.Tensor:
        """What the store holds, without the padding behind a last slice."""
        begin = self.rank * param.ds_tensor.ds_numel
        numel = max(0, min(param.ds_tensor.ds_numel, param.ds_numel - begin))
        return self.store.value(f"param.{param.ds_id}", param.dtype)[:numel]

    def slice_of(self, param: Any, whole: torch.Tensor) -> torch.Tensor:
        begin = self.rank * param.ds_tensor.ds_numel
        return whole.reshape(-1)[begin : begin + param.ds_tensor.ds_numel]

    def gather(self, param: Any) -> None:
        """As a gather over one rank does it."""
        self.param_swapper.swap_in([param], async_op=False)
        param.ds_status = ZeroParamStatus.INFLIGHT
        handle = NoGatherHandle(param)
        self.param_swapper.after_gather([param])
        handle.wait()


def content_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
