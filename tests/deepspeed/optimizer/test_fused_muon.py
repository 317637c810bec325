"""Fused steps of Muon: those of its own step(), and Adam's beside them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.deepspeed.optimizer.fused_adam import FusedAdam, OwnSteps
from memascend.deepspeed.optimizer.fused_muon import FusedMuon, fused_steps
from memascend.errors import ConfigError
from tests.support.tiled_training import tile_shape

RATE, DECAY = 0.03, 0.1
NUMEL = 70_001


def muon(*, with_adam: bool = True) -> Any:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrix, other = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    groups: list[dict[str, Any]] = [
        {"params": [matrix], "use_muon": True, "lr": RATE, "weight_decay": DECAY}
    ]
    if with_adam:
        groups.append({"params": [other], "use_muon": False, "lr": 1e-3})
    return MuonWithAuxAdam(groups, adam_optimizer=DeepSpeedCPUAdam)


def inputs(optimizer: Any) -> list[Any]:
    """Each group's hyperparameters, state and dtypes of states."""
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
    return [
        (group, {}, {"momentum_buffer": torch.bfloat16})
        if group["use_muon"]
        else (group, {"step": 0}, moments)
        for group in optimizer.param_groups
    ]


def fused(optimizer: Any, **options: Any) -> Any:
    return fused_steps(optimizer, tile_shape(), **{"is_wanted": True, "fewer": ""} | options)


def test_a_step_on_any_part_has_the_bits_of_its_own_step() -> None:
    optimizer = muon(with_adam=False)
    generator = torch.Generator().manual_seed(0)
    weight, update = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.data, parameter.grad = weight.clone(), update.clone()
    optimizer.step()
    (step,) = fused(optimizer).updates(inputs(optimizer))
    cuts = [0, 2048, 40_960, NUMEL]
    for begin, end in itertools.pairwise(cuts):
        step(
            begin=begin,
            gradient=update[begin:end],
            factor=1.0,
            weight=weight[begin:end],
            values={},
            scales=None,
            output=None,
        )
    assert torch.equal(weight, parameter.data)


def test_parameters_of_adam_have_its_fused_step() -> None:
    optimizer = muon()
    steps = fused(optimizer)
    assert isinstance(steps, FusedMuon)
    assert isinstance(steps._adam, FusedAdam)
    assert [steps.fuses(group) for group in optimizer.param_groups] == [True, True]
    assert None not in steps.updates(inputs(optimizer))


def test_a_scheduler_may_change_the_rate_behind_a_step() -> None:
    optimizer = muon()
    first, _ = fused(optimizer).updates(inputs(optimizer))
    optimizer.param_groups[0]["lr"] = 0.0
    weight = torch.ones(8)
    first(gradient=torch.zeros(8), weight=weight)
    assert torch.equal(weight, torch.ones(8).mul_(1 - RATE * DECAY))


def test_matrices_with_a_rate_that_is_a_tensor_are_stepped_by_the_optimizer() -> None:
    optimizer = muon()
    optimizer.param_groups[0]["lr"] = torch.tensor(RATE)
    matrices, others = fused(optimizer).updates(inputs(optimizer))
    assert matrices is None
    assert others is not None


@pytest.mark.parametrize("of_adam", [False, True])
def test_hooks_are_called_since_the_optimizer_makes_every_step_then(of_adam: bool) -> None:
    optimizer = muon()
    hooked = optimizer.aux_optimizer if of_adam else optimizer
    hooked.register_step_post_hook(lambda *arguments: None)
    matrices, others = fused(optimizer).updates(inputs(optimizer))
    assert others is None
    assert (matrices is None) is not of_adam
    with pytest.raises(ConfigError, match="hooks"):
        fused(muon_with_hook(), fewer='state_dtype="int8"').updates(inputs(optimizer))


def muon_with_hook() -> Any:
    optimizer = muon()
    optimizer.register_step_post_hook(lambda *arguments: None)
    return optimizer


def test_without_fused_steps_all_are_its_own() -> None:
    steps = fused(muon(), is_wanted=False)
    assert isinstance(steps, OwnSteps)


def test_adam_that_cannot_be_fused_leaves_the_matrices_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("memascend.deepspeed.optimizer.fused_adam.dist.get_rank", lambda: 0)
    optimizer = muon()
    optimizer.param_groups[1]["lr"] = torch.tensor(RATE)
    steps = fused(optimizer)
    assert [steps.fuses(group) for group in optimizer.param_groups] == [True, False]
    matrices, others = steps.updates(inputs(optimizer))
    assert matrices is not None
    assert others is None


def test_running_powers_are_those_of_adam() -> None:
    adam: Any = SimpleNamespace(powers=object())
    assert FusedMuon(muon(), adam).powers is adam.powers


def test_master_weights_of_24_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="Leave master_dtype out"):
        fused(muon(), fewer='master_dtype="bf16+8"')


def test_early_steps_are_those_of_each_kind_and_change_nothing() -> None:
    optimizer = muon()
    steps = fused(optimizer)
    assert steps.is_fused
    given = inputs(optimizer)
    assert [steps.why_not(*one) for one in given] == ["", ""]
    matrix, other = steps.early([(group, 1) for group, _, _ in given])
    (again, same) = steps.updates(given)
    weights = [torch.ones(8) for _ in range(2)]
    for step, weight in zip((matrix, again), weights, strict=True):
        step(
            begin=0,
            gradient=torch.ones(8),
            factor=1.0,
            weight=weight,
            values={},
            scales=None,
            output=None,
        )
    assert torch.equal(*weights)
    assert other.keywords == {}
    assert other.func.__self__ is same.func.__self__


def test_early_steps_need_plain_hyperparameters_and_a_fused_adam() -> None:
    optimizer = muon()
    steps = fused(optimizer)
    (group, values, states), other = inputs(optimizer)
    rate = group | {"lr": torch.tensor(0.1)}
    assert "lr or weight_decay is no number" in steps.why_not(rate, values, states)
    optimizer.register_step_pre_hook(lambda *_: None)
    for one in ((group, values, states), other):
        assert "hooks" in steps.why_not(*one)
    assert fused(muon(with_adam=False)).is_fused
    assert not FusedMuon(optimizer, OwnSteps()).is_fused
