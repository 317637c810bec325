"""Streamed gradients of three parameters, without a model."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from memascend.deepspeed.optimizer.gradients import StreamedGradients
from memascend.streaming.background import BackgroundStep
from memascend.streaming.gradients.stream import GradientStream
from tests.support.streaming_hosts import memory_store, staging_slots

FP32, BF16 = torch.float32, torch.bfloat16
#: Elements of this rank's part of each parameter: one sub-group of two, and one of another.
NUMELS = (5000, 30, 700)
PLACES = ((0, 0), (0, 5000), (1, 0))


class Param:
    """What is asked of one of DeepSpeed's parameters, of which this is the part of rank 1 of 2."""

    def __init__(self, index: int, *, padding: int = 0) -> None:
        self.ds_id = index
        self.ds_numel = 2 * NUMELS[index] - padding
        self.grad_dtype = BF16
        self.grad: Any = None

    def partition_numel(self) -> int:
        return NUMELS[self.ds_id]


class Optimizer(StreamedGradients):
    """Streamed gradients of three parameters, without a model."""

    def __init__(
        self, *, streams_optimizer: bool = True, on_drive: bool = True, dtype: torch.dtype = BF16
    ) -> None:
        self.streams_optimizer = streams_optimizer
        self.params = [Param(index) for index in range(3)]
        self.fp16_groups = [self.params[:2], self.params[2:]]
        self.fp32_partitioned_groups_flat = [self._flat("0_1", 5030), self._flat("2_2", 700)]
        self.store = store = memory_store()
        self.gradient_stream = GradientStream(
            store=store,
            slots=staging_slots(store),
            sum_of_squares=lambda value: value.double().square().sum(),
        )
        self.attachment = SimpleNamespace(
            runtime=SimpleNamespace(lock=threading.RLock(), background=BackgroundStep())
        )
        self.final: list[tuple[str, int]] = []
        self.forget_early = lambda reason: self.final.clear()
        self.tile_places = lambda name, offset: None
        self.note_final = lambda name, offset: self.final.append((name, offset))
        self.grad_position = {i: (*place, NUMELS[i]) for i, place in enumerate(PLACES)}
        self.dtype, self.gradient_accumulation_dtype = BF16, dtype
        self.communication_data_type = BF16
        self.gradient_accumulation_steps = 4
        self.all2all_process_group = None
        self.master_weights_and_grads_dtype = FP32
        self.norm_for_param_grads: dict[int, torch.Tensor] = {}
        self._offload_boundary_param_ids: set[int] = set()
        self.micro_step_id, self.is_last = 0, True
        self.device = torch.device("cpu")
        self.handed: list[tuple[str, list[int], list[Any]]] = []
        self.on_drive = on_drive
        self.optimizer_swapper = SimpleNamespace(swap_out_gradients=self._take)

    @staticmethod
    def _flat(name: str, numel: int) -> Any:
        return SimpleNamespace(ds_id=name, grad=torch.zeros(numel))

    def _take(self, *, parameter: Any, gradient_offsets: Any, gradient_tensors: Any) -> None:
        values = [tensor.tolist() for tensor in gradient_tensors]
        self.handed.append((parameter.ds_id, gradient_offsets, values))
        assert all(tensor.dtype == FP32 for tensor in gradient_tensors)

    def _swappable_optimizer_subgroup(self, sub_group_id: int) -> bool:
        return self.on_drive

    def _get_param_partition_rank(self, param: Any) -> int:
        return 1

    def get_param_id(self, param: Any) -> int:
        return int(param.ds_id)

    def get_param_comm_dtype(self, param: Any) -> torch.dtype:
        return self.communication_data_type

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.is_last

    def arrive(self, *indices: int, value: float = 1.0) -> None:
        """A micro-step in which these parameters get a gradient that is `value` everywhere."""
        dtype = self.gradient_accumulation_dtype
        partitions = [torch.full((NUMELS[index],), value, dtype=dtype) for index in indices]
        for index in indices:
            self.params[index].grad = torch.empty(0, dtype=self.params[index].grad_dtype)
        left = self.partition_grads([self.params[index] for index in indices], partitions)
        assert left == []

    def seen(self, name: str, numel: int) -> list[float]:
        """What the step would see, run by run."""
        found = torch.empty(numel)
        self.gradient_stream.get(name, 0, found)
        return torch.unique_consecutive(found).tolist()
