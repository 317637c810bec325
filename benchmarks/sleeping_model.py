"""A model whose layers compute for a stated time without any CPU: what overlaps it shows.

A layer sleeps where a real one would keep a device busy. Values and gradients are there, so that
DeepSpeed gathers, reduces and steps as it always does, but cost next to nothing.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch


class _Sleep(torch.autograd.Function):
    """Adds the mean of a weight's first row; sleeps both ways."""

    @staticmethod
    def forward(
        context: Any, hidden: torch.Tensor, weight: torch.Tensor, seconds: tuple[float, float]
    ) -> torch.Tensor:
        context.save_for_backward(weight)
        context.seconds = seconds[1]
        time.sleep(seconds[0])
        return hidden + weight[0].mean()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (weight,) = context.saved_tensors
        time.sleep(context.seconds)
        return gradient, torch.full_like(weight, 1e-3) * gradient.mean(), None


class SleepingLayer(torch.nn.Module):
    """One square matrix.

    Args:
        width: Rows and columns.
        seconds: Of sleep in forward, and in backward.
    """

    def __init__(self, width: int, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width, width))
        self._seconds = seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state, as long as it came; 1-D."""
        result: torch.Tensor = _Sleep.apply(hidden, self.weight, self._seconds)
        return result


class SleepingModel(torch.nn.Module):
    """Layers one after the other, called as a language model is.

    Args:
        layers: Their number.
        width: Of each.
        forward_s: Sleep of one layer in forward.
        backward_s: The same in backward.
    """

    def __init__(self, *, layers: int, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            SleepingLayer(width, (forward_s, backward_s)) for _ in range(layers)
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """Return an object with a `loss`; what it is given only sets the size of the input."""
        hidden = torch.ones(input_ids.numel(), dtype=torch.bfloat16, device=input_ids.device)
        hidden.requires_grad_(True)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(loss=hidden.float().pow(2).mean())
