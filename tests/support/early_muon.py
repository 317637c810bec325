"""Muon whose steps begin during backward, and one whose steps do not, without a model.

Sub-groups are of matrices, two to each, or one is of parameters that Adam steps; the optimizer is
DeepSpeed's, and so is the arithmetic of its steps. Gradients come the way that the hooks of a model
take.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import torch

from memascend.deepspeed.optimizer.gradients import StreamedGradients, _Arrival
from memascend.nvme.store import MemoryFaults
from memascend.plan.optimizers import MOMENTUM
from tests.support.early_optimizer import all_early
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_optimizer import NAMES, Tiled
from tests.support.tiled_training import gradients

BF16 = torch.bfloat16
#: A matrix: its sub-group, and its place there.
Which = tuple[str, int]


def muon_update(gradient: torch.Tensor, momentum: torch.Tensor, **options: Any) -> torch.Tensor:
    """As DeepSpeed's, in arithmetic that shows whole matrices; overwrites both arguments."""
    momentum.lerp_(gradient, 1 - options["beta"])
    gradient.lerp_(momentum, options["beta"])
    return gradient / (gradient.norm() + 1)


def make(
    *,
    early: bool | str = True,
    faults: MemoryFaults | None = None,
    block: dict[str, Any] | None = None,
    has_others: bool = False,
    **changes: Any,
) -> Tiled:
    """Every parameter is on the drive; `changes` are of DeepSpeed's object.

    With `has_others` the second sub-group is Adam's.
    """
    others = [1] if has_others else []

    def make_muon(parameters: Any) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        of_adam = [one for number, one in enumerate(parameters) if number in others]
        matrices = [one for number, one in enumerate(parameters) if number not in others]
        group = {"params": matrices, "use_muon": True, "lr": 0.1, "weight_decay": 0.5}
        groups = [group | {"momentum": 0.5, "ns_method": "standard"}]
        adam = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5}
        groups += [{"params": of_adam, "use_muon": False, **adam}] if of_adam else []
        return MuonWithAuxAdam(groups, adam_optimizer=DeepSpeedCPUAdam, adam_optimizer_kwargs=adam)

    stage3 = {
        "use_muon": True,
        "communication_data_type": BF16,
        "norm_for_param_grads": {},
        "get_param_id": lambda param: param.ds_id,
        "sub_group_to_group_id": {number: int(number in others) for number in range(len(NAMES))},
        "_partitioned_buffers_all_gather": _views,
        "_clear_muon_allgather_buffers": lambda: None,
    }
    section = {"during_backward": early} | (block or {})
    optimizer = Tiled(
        make_muon,
        block={"streaming": {"optimizer": section}},
        on_drive=True,
        stage3=stage3 | changes,
        store=memory_store(faults),
        spare_count=4,
    )
    places = {}
    for number, params in enumerate(optimizer.stage3.fp16_groups):
        group = optimizer.groups.group(NAMES[number])
        is_matrix = number not in others
        group.apart = frozenset({MOMENTUM} if is_matrix else ())
        for param, member in zip(params, optimizer.training.members[NAMES[number]], strict=True):
            param.use_muon = is_matrix
            param.ds_shape = torch.Size((member.numel // _rows(member.numel), _rows(member.numel)))
            param.partition_numel = lambda numel=member.numel: numel
            places[param.ds_id] = (number, member.offset, member.numel)
    optimizer.stage3.grad_position = places
    return optimizer


def _rows(numel: int) -> int:
    return next(rows for rows in (10, 2, 1) if numel % rows == 0)


def _views(params: Any, first: Any, dtype: torch.dtype, second: Any) -> Any:
    """As of one rank."""
    return [
        [one.to(dtype).view(param.ds_shape) for param, one in zip(params, ones, strict=True)]
        for ones in (first, second)
    ]


def backward(optimizer: Any, number: int, *, without: Collection[Which] = ()) -> None:
    """As the last micro-step gives gradients: of each matrix, from the last one on."""
    attachment: Any = SimpleNamespace(runtime=optimizer.runtime)
    path = StreamedGradients(optimizer.upstream, lambda: attachment, optimizer.steps)
    given = gradients(number, BF16)
    optimizer.runtime.background.finish()
    for name, params in reversed(list(zip(NAMES, optimizer.stage3.fp16_groups, strict=True))):
        for index, param in reversed(list(enumerate(params))):
            if (name, index) in without:
                continue
            place = optimizer.stage3.grad_position[param.ds_id]
            arrival = _Arrival(
                param=param,
                position=place,
                accumulates=optimizer.stage3.micro_step_id != 0,
                is_final=True,
                narrow_dtype=None,
            )
            value = given[name][place[1] : place[1] + place[2]] * optimizer.stage3.loss_scale
            path._pass_on(arrival, None, value)


def step(optimizer: Any, *, left_out: str = "") -> None:
    """As DeepSpeed steps; it is left out before the updates, or behind them by their norm."""

    def original() -> None:
        if left_out != "before":
            optimizer.steps.update_matrices(None)
        optimizer.stage3.loss_scaler.update_scale(bool(left_out))
        if not left_out:
            optimizer.step_all()

    optimizer.steps.step(original)


def train(optimizer: Any, numbers: range, **keywords: Any) -> None:
    for number in numbers:
        backward(optimizer, number, **keywords)
        all_early(optimizer)
        step(optimizer)


def values(optimizer: Any) -> list[torch.Tensor]:
    """Parameters, master weights and momentum of all matrices, and the norms of their updates."""
    optimizer.steps.finish()
    found = []
    for name in NAMES:
        end = sum(member.numel for member in optimizer.training.members[name])
        found.append(optimizer.training.parameter(name))
        states = (None, *optimizer.groups.group(name).states)
        found += [optimizer.training.master(name, state)[:end] for state in states]
    norms = sorted(optimizer.stage3.norm_for_param_grads.items())
    return [*found, *(norm for _, norm in norms)]


def assert_equal(one: Any, other: Any) -> None:
    for left, right in zip(values(one), values(other), strict=True):
        assert torch.equal(left, right)
