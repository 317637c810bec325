"""A model whose layers compute for a stated time without any CPU: what overlaps it shows.

A layer sleeps where a real one would keep a device busy. Values and gradients are there, so that
DeepSpeed gathers, reduces and steps as it always does, but cost next to nothing. It is one of
transformers' models, so that whatever moves their checkpoints moves its.

Hidden states are written into tensors that are there already: what an operator makes anew is made
in host memory first on the emulated device, and would be counted as the host's.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

#: What hidden states begin with: so small that bf16 shows the first steps of weights beside it.
START = 1 / 64


def compute(device: torch.device, seconds: float) -> None:
    """Has a device compute: the CPU sleeps, the emulated device has a kernel that does."""
    sleep = time.sleep if device.type == "cpu" else torch.get_device_module(device).sleep
    sleep(seconds)


class _Sleep(torch.autograd.Function):
    """Adds the mean of a weight's first row; sleeps both ways. Its input is needed in backward."""

    @staticmethod
    def forward(
        context: Any, hidden: torch.Tensor, weight: torch.Tensor, seconds: tuple[float, float]
    ) -> torch.Tensor:
        context.save_for_backward(hidden, weight)
        context.seconds = seconds[1]
        compute(hidden.device, seconds[0])
        return torch.add(hidden, weight[0].mean(), out=torch.empty_like(hidden))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight = context.saved_tensors
        compute(gradient.device, context.seconds)
        one = 1e-3 * (gradient[..., 0] * hidden[..., -1]).sum()
        return gradient, one.to(weight.dtype).expand_as(weight), None


class _Embed(torch.autograd.Function):
    """Spreads one number over the hidden state; keeps nothing."""

    @staticmethod
    def forward(context: Any, one: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(size, dtype=one.dtype, device=one.device).copy_(one)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.flatten()[0].clone(), None


class _FirstColumn(torch.autograd.Function):
    """Takes the first number of each token, with a gradient that is made in its place."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor) -> torch.Tensor:
        context.size = hidden.size()
        return hidden[..., 0].clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(context.size, dtype=gradient.dtype, device=gradient.device).zero_()
        whole[..., 0].copy_(gradient)
        return whole


class SleepingLayer(GradientCheckpointingLayer):  # type: ignore[misc]
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


class SleepingModel(PreTrainedModel):  # type: ignore[misc]
    """Layers one after the other, called as a language model is.

    Args:
        layers: Their number.
        width: Columns of each.
        rows: Of each; None: as many as columns.
        hidden: Width of the hidden state.
        forward_s: Sleep of one layer in forward.
        backward_s: The same in backward, recomputing not counted.
    """

    supports_gradient_checkpointing = True
    #: No embedding has to be told that it needs a gradient.
    main_input_name = "hidden"

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
        super().__init__(PretrainedConfig())
        self.layers = torch.nn.ModuleList(
            SleepingLayer(rows or width, width, (forward_s, backward_s)) for _ in range(layers)
        )
        self._hidden = hidden

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """Return an object with a `loss`; what it is given only sets the size of the input."""
        size = (*input_ids.shape, self._hidden)
        one = torch.full((), START, dtype=torch.bfloat16, device=input_ids.device)
        hidden = _Embed.apply(one.requires_grad_(True), size)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(loss=(1 - _FirstColumn.apply(hidden).float()).pow(2).mean())
