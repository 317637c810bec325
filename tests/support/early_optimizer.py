"""An optimizer whose steps begin during backward, and one whose steps do not, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.nvme.store import MemoryFaults
from tests.support.older_operator import make_older
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_optimizer import NAMES, Tiled
from tests.support.tiled_training import SIZES, gradients

BF16 = torch.bfloat16
#: Those that hold anything of the first two members, of a third each; two of them are left to the
#: next forward pass, the fourth and the eighth of all.
LEFT_TILES = {NAMES[0]: 3 * 4096, NAMES[2]: 0}
TILES = sum(-(-(numel // 3 * 2) // 4096) for numel in SIZES.values()) - len(LEFT_TILES)


def make(
    *,
    early: bool | str = True,
    overlap: bool = True,
    faults: MemoryFaults | None = None,
    state_dtype: torch.dtype = torch.float32,
    fused: bool = True,
    is_older: bool = False,
    betas: tuple[float, float] = (0.9, 0.95),
    **changes: Any,
) -> Tiled:
    """Every parameter is on the drive; `changes` are of DeepSpeed's object.

    With `is_older` the optimizer calls the operator of DeepSpeed 0.18.9.
    """

    def make_adam(parameters: Any) -> Any:
        optimizer = DeepSpeedCPUAdam(parameters, lr=1e-2, betas=[*betas])
        return make_older(optimizer) if is_older else optimizer

    section = {"during_backward": early, "overlap": overlap, "fused": fused}
    if state_dtype == BF16:
        section["state_dtype"] = "bf16"
    streams_gradients = changes.pop("streams_gradients", True)
    return Tiled(
        make_adam,
        block={"streaming": {"optimizer": section}},
        on_drive=True,
        streams_gradients=streams_gradients,
        stage3=changes,
        store=memory_store(faults),
        state_dtype=state_dtype,
        spare_count=4,
    )


def backward(
    optimizer: Any,
    number: int,
    *,
    without: tuple[str, int] | None = None,
    names: Sequence[str] = NAMES,
) -> None:
    """As the last micro-step gives gradients: of each member, from the last one on."""
    given = gradients(number, BF16)
    for name, value in reversed([(name, given[name]) for name in names]):
        for index, member in reversed(list(enumerate(optimizer.training.members[name]))):
            if (name, index) != without:
                give(optimizer, name, value[member.offset : member.offset + member.numel], member)


def give(optimizer: Any, name: str, value: torch.Tensor, member: Any) -> None:
    """As the gradient path gives one: the last step has used the one before."""
    optimizer.runtime.background.finish()
    accumulate = optimizer.stage3.micro_step_id != 0
    bypass = optimizer.steps.bypass_of(name, member.offset, replaces=not accumulate)
    optimizer.gradient_stream.put(
        name, member.offset, value.clone(), accumulate=accumulate, bypass=bypass
    )
    optimizer.steps.note_final(name, member.offset)


def step(optimizer: Any, *, is_left_out: bool = False, norm: float = 0.0) -> None:
    """As DeepSpeed steps, or as where a norm is not finite; `norm` is multiplied by the scale."""

    def original() -> None:
        if not is_left_out:
            optimizer.stage3.loss_scaler.update_scale(False)
            optimizer.step_all(norm)

    optimizer.steps.step(original)


def all_early(optimizer: Any) -> None:
    """Wait until every tile that can be early is."""
    optimizer.runtime.background.run(lambda: None).result()


def values(optimizer: Any) -> list[torch.Tensor]:
    optimizer.steps.finish()
    found = []
    for name, parameter in zip(NAMES, optimizer.masters, strict=True):
        found.append(optimizer.training.parameter(name))
        states = (None, "exp_avg", "exp_avg_sq")
        found += [optimizer.training.master(name, state) for state in states]
        found.append(torch.tensor(optimizer.base.state[parameter]["step"]))
    return found


def assert_equal(one: Any, other: Any) -> None:
    pairs = zip(values(one), values(other), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def train(optimizer: Any, numbers: range, **keywords: Any) -> None:
    for number in numbers:
        backward(optimizer, number)
        all_early(optimizer)
        step(optimizer, **keywords)


def stepped_whole(
    optimizer: Any, given: Iterable[dict[str, torch.Tensor]], *, is_older: bool
) -> list[torch.Tensor]:
    """The master weights after steps on these gradients, as CPU offload makes them."""
    whole = [torch.nn.Parameter(value.clone()) for value in optimizer.training.initial.values()]
    base = DeepSpeedCPUAdam(whole, **optimizer.base.defaults)
    if is_older:
        make_older(base)
    for gradient in given:
        for name, parameter in zip(NAMES, whole, strict=True):
            parameter.grad = torch.zeros_like(parameter)
            if name in gradient:
                end = sum(member.numel for member in optimizer.training.members[name])
                value = gradient[name][:end].float() / optimizer.stage3.loss_scale
                parameter.grad[:end] = value
        base.step()
    return [parameter.data for parameter in whole]


def change_rate(optimizer: Any) -> None:
    optimizer.base.param_groups[0]["lr"] *= 0.5
