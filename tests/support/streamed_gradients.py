"""Streamed gradients of three parameters, without a model."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from memascend.deepspeed.optimizer.gradients import StreamedGradients
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.streaming.background import BackgroundStep
from memascend.streaming.gradients.stream import GradientStream
from tests.support.runtimes import stand_in
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


def stock_unused(*_: Any) -> None:
    """Stand for DeepSpeed's own way, which must not be taken."""
    raise AssertionError("DeepSpeed's own function was called")


class Steps:
    """The step, as far as gradients tell it of themselves."""

    def __init__(self, *, is_tiled: bool) -> None:
        self.is_tiled = is_tiled
        self.final: list[tuple[str, int]] = []

    def bypass_of(self, name: str, offset: int, *, replaces: bool) -> None: ...

    def note_final(self, name: str, offset: int) -> None:
        self.final.append((name, offset))

    def drop_ahead(self, reason: str) -> None:
        self.final.clear()


class Gradients:
    """Streamed gradients of three parameters, without a model."""

    def __init__(
        self, *, is_tiled: bool = True, on_drive: bool = True, dtype: torch.dtype = BF16
    ) -> None:
        self.params = [Param(index) for index in range(3)]
        self.store = store = memory_store()
        self.gradient_stream = GradientStream(
            store=store,
            slots=staging_slots(store),
            sum_of_squares=lambda value: value.double().square().sum(),
        )
        self.handed: list[tuple[str, list[int], list[Any]]] = []
        self.is_last = True
        self.stage3 = SimpleNamespace(
            fp16_groups=[self.params[:2], self.params[2:]],
            fp32_partitioned_groups_flat=[self._flat("0_1", 5030), self._flat("2_2", 700)],
            grad_position={i: (*place, NUMELS[i]) for i, place in enumerate(PLACES)},
            dtype=BF16,
            gradient_accumulation_dtype=dtype,
            communication_data_type=BF16,
            master_weights_and_grads_dtype=FP32,
            gradient_accumulation_steps=4,
            all2all_process_group=None,
            norm_for_param_grads={},
            _offload_boundary_param_ids=set(),
            micro_step_id=0,
            device=torch.device("cpu"),
            optimizer_swapper=SimpleNamespace(swap_out_gradients=self._take),
            _swappable_optimizer_subgroup=lambda number: on_drive,
            _get_param_partition_rank=lambda param: 1,
            get_param_id=lambda param: param.ds_id,
            get_param_comm_dtype=lambda param: self.stage3.communication_data_type,
            is_gradient_accumulation_boundary=lambda: self.is_last,
        )
        self.lock = threading.RLock()
        self.runtime = runtime = stand_in(
            self.lock, background=BackgroundStep(), gradients=self.gradient_stream
        )
        attachment: Any = SimpleNamespace(runtime=runtime)
        self.steps = Steps(is_tiled=is_tiled)
        self.path = StreamedGradients(Upstream(self.stage3), lambda: attachment, self.steps)

    @property
    def norms(self) -> dict[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = self.stage3.norm_for_param_grads
        return found

    @staticmethod
    def _flat(name: str, numel: int) -> Any:
        return SimpleNamespace(ds_id=name, grad=torch.zeros(numel))

    def _take(self, *, parameter: Any, gradient_offsets: Any, gradient_tensors: Any) -> None:
        values = [tensor.tolist() for tensor in gradient_tensors]
        self.handed.append((parameter.ds_id, gradient_offsets, values))
        assert all(tensor.dtype == FP32 for tensor in gradient_tensors)

    def arrive(self, *indices: int, value: float = 1.0) -> None:
        """A micro-step in which these parameters get a gradient that is `value` everywhere."""
        dtype = self.stage3.gradient_accumulation_dtype
        partitions = [torch.full((NUMELS[index],), value, dtype=dtype) for index in indices]
        for index in indices:
            self.params[index].grad = torch.empty(0, dtype=self.params[index].grad_dtype)
        left = self.path.put([self.params[index] for index in indices], partitions, stock_unused)
        assert left == []

    def seen(self, name: str, numel: int) -> list[float]:
        """What the step would see, run by run."""
        found = torch.empty(numel)
        self.gradient_stream.get(name, 0, found)
        return torch.unique_consecutive(found).tolist()
