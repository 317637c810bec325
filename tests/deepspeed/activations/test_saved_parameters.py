"""A function that looks for its own parameter in backward finds it, whatever hooks are set."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch

from memascend.deepspeed.activations import saved_parameters as module

pytestmark = pytest.mark.deepspeed


class Scale(torch.autograd.Function):
    """As TRL's chunked loss: backward asks its weight for what DeepSpeed has put on it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        assert weight.ds_status == "available"
        return gradients[0] * weight, (gradients[0] * hidden).sum()


def trained(monkeypatch: pytest.MonkeyPatch, *, saves: bool, wraps: bool) -> list[str]:
    """Run it under two pairs of hooks; return which of them had something to pack."""
    packed: list[str] = []

    def hooks(name: str) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(name)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    monkeypatch.setattr(module, "current", ContextVar("current"))
    module.current.set(object() if saves else None)
    weight = torch.nn.Parameter(torch.ones(()))
    weight.ds_status = "available"
    apply = module.wrap_apply(Scale.apply) if wraps else Scale.apply
    with hooks("outer"), hooks("inner"):
        hidden = torch.ones(4, requires_grad=True)
        loss = apply(hidden, weight)
        (loss * hidden).sum().backward()
    return packed


def test_without_the_wrapper_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="ds_status"):
        trained(monkeypatch, saves=True, wraps=False)


def test_it_does_and_what_comes_after_has_its_hooks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained(monkeypatch, saves=True, wraps=True) == ["inner", "inner"]


def test_hooks_of_others_are_left_alone_where_nothing_goes_to_the_drive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(AttributeError, match="ds_status"):
        trained(monkeypatch, saves=False, wraps=True)
