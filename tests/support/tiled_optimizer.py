"""Steps in tiles over the sub-groups of a Training, without a model or an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from memascend.base.interfaces import Device
from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.tiled import TiledSteps
from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.nvme.resident import ResidentStore
from memascend.streaming.background import BackgroundStep
from memascend.streaming.hand_over import HandOver
from tests.support.runtimes import stand_in
from tests.support.tiled_training import SIZES, Training

BF16 = torch.bfloat16
NAMES = list(SIZES)
FLAT = 1  # the sub-group whose parameters are in memory as one tensor


class Swapper(ParameterSwapper):
    """Knows the keys of parameters, and nothing else."""

    def __init__(self) -> None: ...

    def key(self, param: Any) -> str:
        return str(param.key)


class Stage3(SimpleNamespace):
    """DeepSpeed's optimizer, as far as steps in tiles ask for it: one that steps a Training."""

    def __init__(self, training: Training) -> None:
        masters: list[Any] = list(training.parameters.values())
        for name, master in zip(NAMES, masters, strict=True):
            master.ds_id = name
        flat = torch.zeros(SIZES[NAMES[FLAT]], dtype=BF16)
        super().__init__(
            optimizer=training.optimizer,
            sub_group_to_group_id=dict.fromkeys(range(3), 0),
            fp32_partitioned_groups_flat=masters,
            fp16_partitioned_groups_flat_numel=list(SIZES.values()),
            fp16_partitioned_groups_flat=[None, flat, None],
            fp16_groups=[_params(name, training) for name in NAMES],
            loss_scaler=LossScaler(4.0),
            custom_loss_scaler=False,
            clip_grad=0.0,
            micro_step_id=0,
            dtype=BF16,
            gradient_accumulation_dtype=BF16,
            master_weights_and_grads_dtype=torch.float32,
            grad_position={0: (0, 100, 6)},
            get_param_id=lambda param: 0,
            param_names=_Names(),
            _get_param_partition_rank=lambda param: 0,
            persistent_parameters=[],
        )

    @property
    def loss_scale(self) -> float:
        return float(self.loss_scaler.cur_scale)


class Tiled:
    """Steps in tiles, as DeepSpeed's hooks call them."""

    def __init__(
        self,
        make: Any,
        *,
        block: dict[str, Any] | None = None,
        on_drive: bool = False,
        streams_gradients: bool = True,
        stage3: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """With `on_drive` the first two thirds of a sub-group are all of it; none is in memory.

        Steps begin after backward unless the block says otherwise.
        """
        block = dict(block or {})
        streaming = dict(block.get("streaming", {}))
        streaming["optimizer"] = {"during_backward": False, **streaming.get("optimizer", {})}
        self.training = training = Training(make, **options)
        if on_drive:
            training.members = {name: training.members[name][:2] for name in NAMES}
        self.stage3 = Stage3(training)
        self.unflattened: list[int] = []
        self.stage3._unflatten_partitioned_parameters = self.unflattened.append
        if on_drive:
            self.stage3.fp16_partitioned_groups_flat = [None] * len(NAMES)
        for name, value in (stage3 or {}).items():
            setattr(self.stage3, name, value)
        self.upstream = Upstream(self.stage3)
        self.gradient_stream, self.stream = training.gradient_stream, training.stream
        self.groups = training.groups
        store = ResidentStore(training.store, stream_of=lambda key: None)
        self.stream._take_over = store.take_over
        self.runtime = stand_in(
            io=training.store,
            memory=training.memory,
            staging=training.slots,
            config=parse_block(block | {"streaming": streaming}),
            plan=None,
            store=store,
            drive=SimpleNamespace(free_bytes=lambda: None),
            background=BackgroundStep(),
            hand_over=HandOver(),
            new_event=None,
            device=Device(),
            gradients=self.gradient_stream,
            optimizer=self.stream,
            open_optimizer=self._open,
        )
        attachment: Any = SimpleNamespace(runtime=self.runtime)
        self.steps = TiledSteps(
            self.upstream, lambda: attachment, streams_gradients=streams_gradients
        )
        self.stage3._reassign_or_swap_out_partitioned_parameters = lambda number: (
            self.steps.update_parameters(number, stock_unused)
        )
        self.steps.configure(None, None)

    def _open(self, shape: Any) -> Any:
        self.shape = shape  # what was asked for: the tiles of the Training serve
        return self.stream

    @property
    def lock(self) -> Any:
        return self.runtime.lock

    @property
    def base(self) -> Any:
        return self.stage3.optimizer

    @property
    def masters(self) -> list[Any]:
        return list(self.stage3.fp32_partitioned_groups_flat)

    def step_all(self, norm: float = 0.0) -> None:
        """As DeepSpeed's loop: every hook of a sub-group, one sub-group after the other."""
        for index in range(len(NAMES)):
            self.steps.prepare(index, stock_unused)
            self.steps.unscale(index, torch.tensor(norm), stock_unused)
            self.steps.step_sub_group(index, self._step_base(index))
            self.steps.update_parameters(index, stock_unused)
            self.steps.release(stock_unused)
        self.steps.end(lambda: None)

    def _step_base(self, index: int) -> Any:
        def step() -> None:
            self.base.param_groups[0]["params"] = [self.masters[index]]
            self.base.step()
            self.base.param_groups[0]["params"] = []

        return step

    def walk(self, values: dict[str, torch.Tensor], norm: float = 0.0) -> None:
        """Make a step on these gradients."""
        for name, value in values.items():
            self.gradient_stream.put(name, 0, value)
        self.steps.step(lambda: self.step_all(norm))
        self.steps.finish()

    def parameter(self, index: int) -> torch.Tensor:
        """What the model has of a sub-group."""
        flat = self.stage3.fp16_partitioned_groups_flat[index]
        return self.training.parameter(NAMES[index]) if flat is None else flat


def stock_unused() -> None:
    """Stand for DeepSpeed's own way, which must not be taken."""
    raise AssertionError("DeepSpeed's own function was called")


def _params(name: str, training: Training) -> list[Any]:
    swapper, params = Swapper(), []
    for index, member in enumerate(training.members[name]):
        shard = SimpleNamespace(
            ds_numel=member.numel,
            final_location="nvme" if member.tensor is None else None,
            data=member.tensor,
            dtype=member.dtype,
        )
        ds_id = 10 * NAMES.index(name) + index
        params.append(
            SimpleNamespace(
                ds_tensor=shard,
                ds_numel=member.numel,
                key=member.key,
                ds_id=ds_id,
                nvme_swapper=swapper,
            )
        )
    return params


class _Names:
    """Of parameters: their keys."""

    def __getitem__(self, param: Any) -> str:
        return str(param.key)
