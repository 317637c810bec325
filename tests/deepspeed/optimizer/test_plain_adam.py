"""Which optimizers' steps may be made by somebody else, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend.deepspeed.optimizer.plain_adam import (
    fp32,
    why_not_plain_numbers,
    why_not_plain_step,
)

GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": torch.tensor(0.5)},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9, 0.999_999_999_9)},  # 1 in fp32
        {"betas": (-0.1, 0.9)},
    ],
)
def test_numbers_that_cannot_be_computed_are_named(changed: dict[str, Any]) -> None:
    assert why_not_plain_numbers(GROUP) == ""
    name, value = next(iter(changed.items()))
    assert f"{name}={value}" in why_not_plain_numbers(GROUP | changed)


def test_a_step_with_hooks_or_of_somebody_else_is_told() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert why_not_plain_step(optimizer) == ""
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # wraps it, to count calls
    assert why_not_plain_step(optimizer) == ""
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert "hooks" in why_not_plain_step(optimizer)
    handle.remove()
    optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    assert why_not_plain_step(optimizer)


def test_numbers_are_rounded_as_in_c() -> None:
    assert fp32(0.1) == torch.tensor(0.1).item()
    assert fp32(1e39) == float("inf")
