"""A rank with two of Muon's matrices, on a store in memory, without DeepSpeed's kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memascend.base.interfaces import Device
from memascend.config.block import parse_block
from memascend.deepspeed.optimizer.muon import MuonUpdates
from memascend.memory.guard import Guard
from memascend.nvme.resident import ResidentStore
from memascend.plan.optimizers import MOMENTUM
from memascend.streaming.gradients.on_device import GradientsOnDevice
from memascend.streaming.optimizer.step import Step
from memascend.streaming.optimizer.sub_group import Member
from memascend.streaming.optimizer.sub_group_step import early_key
from tests.support.tiled_training import SIZES, Training

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, COLUMNS = 7, 11
NUMEL = ROWS * COLUMNS


def plain_updates(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Have arithmetic that shows whole matrices, with DeepSpeed's signature; return its calls."""
    from deepspeed.runtime.zero.muon import original_muon

    calls: list[dict[str, Any]] = []

    def muon_update(gradient: torch.Tensor, momentum: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(options | {"shape": tuple(gradient.shape)})
        momentum.lerp_(gradient, 1 - options["beta"])
        return gradient / (momentum.norm() + 1)

    monkeypatch.setattr(original_muon, "muon_update", muon_update)
    return calls


class Rank:
    """A rank that has one part of each of two matrices, and the other ranks' parts at hand."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        *,
        device: Device | None = None,
        applies: bool = False,
        **changes: Any,
    ) -> None:
        device = device or Device()
        self.on_device = GradientsOnDevice(device, Guard(threading.RLock()))
        self.training = Training(lambda params: torch.optim.SGD(params, lr=1.0))
        self.part_numel = -(-NUMEL // world)
        self.others: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self.norms: dict[int, torch.Tensor] = {}
        shape = torch.Size((ROWS, COLUMNS))
        self.params = [
            SimpleNamespace(
                number=number,
                use_muon=True,
                ds_numel=NUMEL,
                ds_shape=shape,
                partition_numel=lambda: self.part_numel,
            )
            for number in range(2)
        ]
        names = list(SIZES)
        self.upstream: Any = SimpleNamespace(
            accumulation_dtype=BF16,
            reduction_dtype=BF16,
            master_dtype=FP32,
            loss_scale=1.0,
            params=[[], self.params, [SimpleNamespace(use_muon=False)]],
            masters=[SimpleNamespace(ds_id=name) for name in names],
            base=self.training.optimizer,
            position_of=lambda param: (1, param.number * self.part_numel, self.part_numel),
            part_begin=lambda param, numel: rank * numel,
            hyperparameters=lambda number: {
                "momentum": 0.5,
                "ns_method": "standard",
                "lr": 0.1,
                "weight_decay": 0.5,
            },
            gather_matrix=self._gather,
            note_norm=lambda param, norm: self.norms.__setitem__(param.number, norm),
            norm_max=0.0 if applies else 1.0,
            dtype=BF16,
            members=self._members,
        )
        for name, value in changes.items():
            setattr(self.upstream, name, value)
        self.rank = rank
        runtime: Any = SimpleNamespace(
            optimizer=self.training.stream,
            gradients=self.training.gradient_stream,
            staging=self.training.slots,
            device=device,
            on_device=self.on_device,
            store=ResidentStore(self.training.store, stream_of=lambda key: None),
            config=parse_block({}),
            plan=None,
            drive=SimpleNamespace(free_bytes=lambda: None),
        )
        self.store = runtime.store
        self.updates = MuonUpdates(self.upstream, runtime, None)
        self.group = self.training.groups.group(names[1])
        self.group.apart = frozenset(self.training.groups.apart)
        self.training.groups.add_state(names[1], MOMENTUM, self.updates.momentum_dtype, 0.0)

    def put(self, number: int, whole: torch.Tensor) -> None:
        self.training.gradient_stream.put(
            self.group.name, number * self.part_numel, self.part(whole)
        )

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros(2 * NUMEL, dtype=whole.dtype)
        flat[:NUMEL] = whole.flatten()
        return flat.narrow(0, self.rank * self.part_numel, self.part_numel).clone()

    def _members(self, number: int) -> list[Member]:
        """One that covers the sub-group, which is larger than the two matrices."""
        numel = self.group.numel
        self.training.store.reserve(key="param", nbytes=numel * 2)
        return [Member(0, numel, BF16, key="param")]

    def _gather(self, param: Any, *parts: torch.Tensor) -> list[torch.Tensor]:
        if self.part_numel == NUMEL:
            return [part.view(param.ds_shape) for part in parts]
        whole = []
        for part, others in zip(parts, self.others[param.number], strict=True):
            every = list(others)
            every.insert(self.rank, part)
            whole.append(torch.cat(every)[:NUMEL].view(param.ds_shape))
        return whole

    def read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The update and the momentum that the walk and the next step see."""
        begin = number * self.part_numel
        found = [torch.empty(self.part_numel) for _ in range(2)]
        self.training.gradient_stream.get(self.group.name, begin, found[0])
        self.training.groups.get(self.group.name, begin, found[1], state=MOMENTUM)
        return found[0], found[1]

    def step(self, seed: int, *numbers: int, is_skipped: bool = False) -> None:
        """A step of these matrices' gradients; the others get none. The walk is not made."""
        for number in numbers:
            self.put(number, gradients(seed)[number])
        self.updates.update_all()
        begins, _ = self.updates.take_results(Step())
        for name, some in begins.items():
            assert some == frozenset(self.training.groups.begins(name))
            group = self.training.groups.group(name)
            for key in (*group.all_keys, "param"):
                if not is_skipped:
                    self.store.take_over(key=key, other=early_key(key))
        self.training.groups.settle()
        self.updates.restart()

    def weights(self, number: int) -> torch.Tensor:
        value = torch.empty(self.part_numel)
        self.training.groups.get(self.group.name, number * self.part_numel, value, state=None)
        return value

    def is_stored(self, number: int) -> bool:
        shard = self.training.gradient_stream.find(self.group.name, number * self.part_numel)
        return shard is not None and not shard.is_replaced


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, COLUMNS, generator=generator).bfloat16() for _ in range(2)]


def expected(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Update and momentum of each matrix, of whole ones in memory."""
    momenta = [torch.zeros(ROWS, COLUMNS, dtype=BF16) for _ in range(2)]
    updates = []
    for step in range(steps):
        updates = [gradient.clone() for gradient in gradients(step)]
        for update, momentum in zip(updates, momenta, strict=True):
            momentum.lerp_(update, 0.5)
            update.div_(momentum.norm() + 1)
    return list(zip(updates, momenta, strict=True))


class Passed:
    """An event of a device that is always done."""

    def record(self) -> None: ...
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def with_streams(log: list[str]) -> Device:
    """Return a device whose work on its second stream is logged."""

    @contextmanager
    def on_stream() -> Iterator[None]:
        log.append("aside")
        yield
        log.append("back")

    return Device(new_event=Passed, new_stream=lambda: on_stream)
