"""Live optimizers: which may go by tiles, and how many states are planned for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.config.deepspeed import parse_deepspeed
from memascend.deepspeed.plan.optimizers import (
    initial_state,
    is_elementwise,
    named_as,
    state_count,
    state_dtype,
)

ELEMENTWISE = [
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD),
]


def made(kind: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([torch.nn.Parameter(torch.ones(7))], lr=1e-3, **options)
    return optimizer


class AdamW(torch.optim.AdamW):
    """Called as a known one, and may do anything."""


def test_an_optimizer_is_known_by_its_name_and_its_package() -> None:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    for kind in (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad, *ELEMENTWISE):
        assert is_elementwise(kind.__new__(kind)), kind
    for kind in (AdamW, torch.optim.NAdam, torch.optim.LBFGS, torch.optim.Adafactor):
        assert not is_elementwise(kind.__new__(kind)), kind


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.25}),
    ],
)
def test_a_known_start_is_what_the_optimizer_makes(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    optimizer = made(kind, **options)
    (group,) = optimizer.param_groups
    start = initial_state(optimizer, group)
    assert start is not None
    scalars, fills = start
    parameter = group["params"][0]
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    assert set(state) == scalars.keys() | fills.keys()
    assert state["step"].dtype == scalars["step"].dtype
    for name, fill in fills.items():  # a gradient of zeros leaves them
        assert state[name].unique().tolist() == [fill]


@pytest.mark.parametrize("kind", [torch.optim.Adamax, torch.optim.SGD, AdamW])
def test_others_make_their_state_themselves(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = made(kind)
    assert initial_state(optimizer, optimizer.param_groups[0]) is None


def states_of(optimizer: torch.optim.Optimizer) -> int:
    """State tensors that an optimizer really makes."""
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for value in optimizer.state[parameter].values()
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ELEMENTWISE),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_as_many_states_are_planned_as_an_optimizer_makes(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """A state that was not planned takes memory in the first step."""
    optimizer = kind([torch.nn.Parameter(torch.ones(7))], lr=1e-3, **options)
    assert state_count(optimizer) == states_of(optimizer)


def test_the_group_with_most_states_counts() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "momentum": m} for m in (0.0, 0.9)]
    assert state_count(torch.optim.SGD(groups, lr=0.1)) == 1


@pytest.mark.parametrize(
    ("keywords", "asked", "expected"),
    [
        ({}, "fp32", torch.float32),
        ({"fp32_optimizer_states": True}, "fp32", torch.float32),
        ({"fp32_optimizer_states": False}, "fp32", torch.float16),
        ({"fp32_optimizer_states": True}, "bf16", torch.bfloat16),
        ({"fp32_optimizer_states": False}, "int8", torch.float32),
    ],
)
def test_states_follow_the_master_weights_only_where_deepspeed_is_told_so(
    keywords: dict[str, bool], asked: str, expected: torch.dtype
) -> None:
    optimizer = SimpleNamespace(**keywords)
    assert state_dtype(optimizer, torch.float16, asked) == expected


@pytest.mark.parametrize(
    ("live", "stated", "named"),
    [
        ("MuonWithAuxAdam", "AdamW", "Muon"),  # the JSON's default
        ("MuonWithAuxAdam", "Muon", "Muon"),
        ("DeepSpeedCPUAdam", "Muon", "AdamW"),
        ("SGD", "Muon", "SGD"),
        ("SGD", "Adam", "Adam"),
    ],
)
def test_settings_name_muon_if_the_live_optimizer_is_muon(
    live: str, stated: str, named: str
) -> None:
    settings = parse_deepspeed({"optimizer": {"type": stated, "params": {"lr": 1e-3}}})
    found = named_as(settings, type(live, (), {})())
    assert found.optimizer.type == named
    assert found.optimizer.params == settings.optimizer.params
    assert found.zero_optimization == settings.zero_optimization


def test_muon_has_momentum_for_matrices_and_adams_moments_for_the_rest() -> None:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    optimizer = MuonWithAuxAdam.__new__(MuonWithAuxAdam)
    assert is_elementwise(optimizer)
    assert initial_state(optimizer, {"use_muon": True}) == ({}, {"momentum_buffer": 0.0})
    adam = made(torch.optim.AdamW)
    assert initial_state(adam, adam.param_groups[0] | {"use_muon": True}) == initial_state(
        adam, adam.param_groups[0]
    )
    assert initial_state(optimizer, {"use_muon": False}) == (
        {"step": 0},
        {"exp_avg": 0.0, "exp_avg_sq": 0.0},
    )
