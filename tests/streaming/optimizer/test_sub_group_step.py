"""What an optimizer has of a tile between two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend.streaming.optimizer.sub_group import SubGroup
from memascend.streaming.optimizer.sub_group_step import (
    SubGroupStep,
    as_number,
    copy_scalars,
    early_key,
    empty_parameter,
    is_state_tensor,
    step_nothing,
)


def test_a_factor_is_a_number_where_fp32_stays_fp32() -> None:
    assert as_number(0.5) == as_number(torch.tensor(0.5)) == 0.5
    assert as_number(torch.tensor([0.5])) is None
    assert as_number(torch.tensor(0.5, device="meta")) is None


def test_copies_of_scalars_are_not_changed_with_them() -> None:
    scalars = {"step": torch.tensor(3.0), "mark": "a"}
    copied = copy_scalars(scalars)
    scalars["step"] += 1
    assert copied == {"step": torch.tensor(3.0), "mark": "a"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("exp_avg", torch.zeros(4), True),
        ("exp_avg", torch.zeros(3), False),
        ("step", torch.zeros(4), False),
        ("exp_avg", 4, False),
    ],
)
def test_a_state_has_an_element_for_each_of_the_parameter(
    name: str, value: Any, expected: bool
) -> None:
    assert is_state_tensor(name, value, 4) == expected


def test_what_is_let_go_holds_no_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.zeros(4)
    values = {"exp_avg": torch.zeros(4), "step": 1}
    empty_parameter(
        parameter, values, SubGroup("0", 4, {"exp_avg": torch.float32, "late": torch.float32})
    )
    assert (parameter.numel(), parameter.grad, values["exp_avg"].numel()) == (0, None, 0)


def test_a_step_of_no_element_is_counted() -> None:
    parameter = torch.nn.Parameter(torch.empty(0))
    seen = []

    def fused(*, values: Any, **tensors: Any) -> None:
        values["step"] += 1
        seen.append({name: getattr(value, "shape", value) for name, value in tensors.items()})

    def update() -> None:
        raise AssertionError

    step = SubGroupStep(
        name="0",
        parameter=parameter,
        states={parameter: {"step": 3}},
        update=update,
        factor=0.5,
        members=[],
        fused=fused,
    )
    step_nothing(step)
    assert step.states[parameter] == {"step": 4}
    (given,) = seen
    expected = {"begin": 0, "gradient": (0,), "factor": 1.0, "weight": (0,), "output": None}
    assert given == expected | {"scales": (0,)}


def test_an_optimizer_that_steps_by_itself_is_called_for_no_element() -> None:
    parameter, calls = torch.nn.Parameter(torch.empty(0)), []
    step = SubGroupStep(
        name="0",
        parameter=parameter,
        states={parameter: {}},
        update=lambda: calls.append(parameter.numel()),
        factor=1.0,
        members=[],
    )
    step_nothing(step)
    assert calls == [0]


def test_second_values_have_a_name_of_their_own() -> None:
    assert early_key("master.0") != early_key("master.1")
    assert early_key("master.0") != "master.0"
