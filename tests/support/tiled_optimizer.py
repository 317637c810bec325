"""DeepSpeed's hooks of an optimizer that is stepped in tiles, without a model or an engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.tiled_steps import TiledSteps, _PutBack
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.nvme.resident import ResidentStore
from memascend.streaming.background import BackgroundStep
from tests.support.tiled_training import SIZES, Training

BF16 = torch.bfloat16
NAMES = list(SIZES)
FLAT = 1  # the sub-group whose parameters are in memory as one tensor


class Swapper(ParameterSwapper):
    """Knows the keys of parameters, and nothing else."""

    def __init__(self) -> None: ...

    def key(self, param: Any) -> str:
        return str(param.key)


class Optimizer(TiledSteps):
    """The sub-groups of a Training under DeepSpeed's hooks, without a model."""

    streams_gradients = True
    offload_optimizer = zenflow = False  # no second optimizer on the device
    _param_swapper: Any = None

    def __init__(self, make: Any, **options: Any) -> None:
        self.training = training = Training(make, **options)
        self.groups, self.stream, self.gradient_stream = (
            training.groups,
            training.stream,
            training.gradient_stream,
        )
        self.integrity = training.groups.integrity
        self.optimizer = training.optimizer
        self.sub_group_to_group_id = dict.fromkeys(range(3), 0)
        self.torch_autocast_gradscaler = None
        self.fp32_partitioned_groups_flat: list[Any] = list(training.parameters.values())
        for name, parameter in zip(NAMES, self.fp32_partitioned_groups_flat, strict=True):
            parameter.ds_id = name
        self.fp16_partitioned_groups_flat_numel = list(SIZES.values())
        self.fp16_groups = [self._params(name) for name in NAMES]
        flat = torch.zeros(SIZES[NAMES[FLAT]], dtype=BF16)
        self.fp16_partitioned_groups_flat = [None, flat, None]
        self.runtime = SimpleNamespace(
            io=training.store,
            memory=training.memory,
            staging=training.slots,
            config=parse_block({}),
            plan=None,
            store=ResidentStore(training.store, stream_of=lambda key: None),
            background=BackgroundStep(),
            new_event=None,
            lock=threading.RLock(),
        )
        self.attachment = SimpleNamespace(runtime=self.runtime)
        self.loss_scaler, self.custom_loss_scaler = LossScaler(4.0), False
        self.clip_grad = 0.0
        self.micro_step_id = 0
        self.master_weights_and_grads_dtype = torch.float32
        self.gradient_accumulation_dtype = self.dtype = BF16
        self._put_back = _PutBack()
        self.unflattened: list[int] = []
        self.grad_position = {0: (0, 100, 6)}

    def _params(self, name: str) -> list[Any]:
        swapper, params = Swapper(), []
        for index, member in enumerate(self.training.members[name]):
            on_drive = member.tensor is None
            shard = SimpleNamespace(
                ds_numel=member.numel,
                final_location="nvme" if on_drive else None,
                data=member.tensor,
                dtype=member.dtype,
            )
            ds_id = 10 * NAMES.index(name) + index
            param = SimpleNamespace(ds_tensor=shard, key=member.key, ds_id=ds_id)
            params.append(SimpleNamespace(**vars(param), nvme_swapper=swapper))
        return params

    def get_param_id(self, param: Any) -> int:
        return 0

    def _unflatten_partitioned_parameters(self, sub_group_id: int) -> None:
        self.unflattened.append(sub_group_id)

    def walk(self, values: dict[str, torch.Tensor], norm: float = 0.0) -> None:
        """As upstream steps: every hook of a sub-group, one sub-group after the other."""
        for name, value in values.items():
            self.gradient_stream.put(name, 0, value)
        for index in range(len(NAMES)):
            self._prepare_sub_group(index, None)
            self.unscale_and_clip_grads(index, torch.tensor(norm))
            self._optimizer_step(index)
            self._reassign_or_swap_out_partitioned_parameters(index)
            self._release_sub_group(index, None)
        self.stream.drain()

    def parameter(self, index: int) -> torch.Tensor:
        """What the model has of a sub-group."""
        flat = self.fp16_partitioned_groups_flat[index]
        return self.training.parameter(NAMES[index]) if flat is None else flat
