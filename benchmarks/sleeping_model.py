"""A model whose layers compute for a stated time without any CPU: what overlaps it shows.

A layer sleeps where a real one would keep a device busy. Values and gradients are there, so that
DeepSpeed gathers, reduces and steps as it always does, but cost next to nothing.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def compute(device: torch.device, seconds: float) -> None:
    """Has a device compute: the CPU sleeps, the emulated device has a kernel that does."""
    sleep = time.sleep if device.type == "cpu" else torch.get_device_module(device).sleep
    sleep(seconds)


class _Sleep(torch.autograd.Function):
    """Adds the mean of a weight's first row; sleeps both ways."""

    @staticmethod
    def forward(
        context: Any, hidden: torch.Tensor, weight: torch.Tensor, seconds: tuple[float, float]
    ) -> torch.Tensor:
        context.save_for_backward(weight)
        context.seconds = seconds[1]
        compute(hidden.device, seconds[0])
        return hidden + weight[0].mean()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (weight,) = context.saved_tensors
        compute(gradient.device, context.seconds)
        return gradient, (1e-3 * gradient.mean()).to(weight.dtype).expand_as(weight), None


class SleepingLayer(torch.nn.Module):
    """One matrix.

    Args:
        rows: Of it.
        width: Columns of it.
        seconds: Of sleep in forward, and in backward.
    """

    def __init__(self, rows: int, width: int, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, width))
        self._seconds = seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden state, as large as it came."""
        result: torch.Tensor = _Sleep.apply(hidden, self.weight, self._seconds)
        return result


class SleepingModel(torch.nn.Module):
    """Layers one after the other, called as a language model is.

    Args:
        layers: Their number.
        width: Columns of each.
        rows: Of each; None: as many as columns.
        hidden: Width of the hidden state.
        forward_s: Sleep of one layer in forward.
        backward_s: The same in backward, recomputing not counted.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        rows: int | None = None,
        hidden: int = 1,
        forward_s: float,
        backward_s: float,
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            SleepingLayer(rows or width, width, (forward_s, backward_s)) for _ in range(layers)
        )
        self._hidden = hidden
        self._has_checkpoints = False

    def gradient_checkpointing_enable(self) -> None:
        """Have each layer keep its input alone, and compute again in backward."""
        self._has_checkpoints = True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """Return an object with a `loss`; what it is given only sets the size of the input."""
        size = (input_ids.numel(), self._hidden)
        hidden = torch.ones(size, dtype=torch.bfloat16, device=input_ids.device)
        hidden.requires_grad_(True)
        for layer in self.layers:
            if self._has_checkpoints:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return SimpleNamespace(loss=hidden[:, 0].float().pow(2).mean())
