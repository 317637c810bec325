"""Trains the model of bytes with AdamW, with moments and master weights in a stated format.

Weights and gradients are bf16 numbers, and gradients are clipped. The learning rate rises to its
peak and then falls along a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from byte_model import ByteModel, Text, sequences
from state_formats import BF16, FORMATS, FP32, NUMEL_MULTIPLE, Moments

from memascend.kernels import remainders
from memascend.kernels.adam import AdamCoefficients, make_rounding_key

#: Hyperparameters of AdamW; the learning rate rises to its peak, then falls along a cosine.
RATE_PEAK, RATE_FALL = 2e-3, 100
BETA1, BETA2, EPSILON, DECAY, CLIPPING = 0.9, 0.999, 1e-8, 0.1, 1.0
#: Held-out losses are taken at so many equal parts of a training.
PARTS = 4


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained: steps on `rows` sequences each, and the held-out batches."""

    model: ByteModel
    rows: int
    steps: int
    warmup: int
    held_out_batches: int


@dataclass(frozen=True, slots=True)
class Run:
    """A training: formats, and its difference from fp32's beside them."""

    name: str
    moments: str
    master_dtype: torch.dtype = FP32
    moved: float = 1.0
    batches: int = 0


class Weights:
    """Master weights, whole or in 24 bits, and the bf16 weights that forward uses."""

    def __init__(self, whole: torch.Tensor, dtype: torch.dtype) -> None:
        self.output = whole.to(BF16)
        self._kept = whole.clone() if dtype == FP32 else torch.empty(whole.numel(), dtype=dtype)
        if dtype != FP32:
            remainders.cut(whole, self.output, self._kept)

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """As `adam.update` takes them."""
        return {"weight": self._kept, "output": self.output}

    def read(self) -> torch.Tensor:
        """Gives master weights in fp32."""
        if self._kept.dtype == FP32:
            return self._kept
        whole = torch.empty(self._kept.numel())
        remainders.join(self.output, self._kept, whole)
        return whole


def learning_rate(step: int, training: Training) -> float:
    """The rate of a step, counted from 1."""
    if step <= training.warmup:
        return RATE_PEAK * step / training.warmup
    least = RATE_PEAK / RATE_FALL
    done = (step - training.warmup) / (training.steps - training.warmup)
    return least + (RATE_PEAK - least) * (1 + math.cos(math.pi * done)) / 2


def coefficients(step: int, rate: float, factor: float) -> AdamCoefficients:
    """AdamW's, with bias correction."""
    return AdamCoefficients(
        factor=factor,
        beta1=BETA1,
        beta2=BETA2,
        take1=1 - BETA1,
        take2=1 - BETA2,
        root_scale=1 / math.sqrt(1 - BETA2**step),
        epsilon=EPSILON,
        step_size=-rate / (1 - BETA1**step),
        weight_decay=-rate * DECAY,
    )


def first_weights(run: Run, seed: int, training: Training) -> torch.Tensor:
    """bf16 numbers in fp32, but for the weight that was moved; zeros make the last block whole."""
    model = training.model
    numel = -(-model.numel // NUMEL_MULTIPLE) * NUMEL_MULTIPLE
    whole = torch.zeros(numel)
    whole[: model.numel] = model.initial(seed).to(BF16)
    whole[model.numel // 2] *= run.moved
    return whole


def train(
    run: Run, seed: int, training: Training, text: Text, watch: Callable[[int, Moments], None]
) -> tuple[list[float], torch.Tensor]:
    """Trains, and gives held-out losses of each part and the last master weights in fp32.

    After a gradient that is not finite it ends, and the losses left are NaN. `watch` gets every
    step's number and the moments after it.
    """
    weights = Weights(first_weights(run, seed, training), run.master_dtype)
    moments = FORMATS[run.moments](weights.output.numel())
    generator = torch.Generator().manual_seed(seed + run.batches)
    losses: list[float] = []
    for step in range(1, training.steps + 1):
        used = weights.output.float().requires_grad_()
        training.model.loss(
            used, *sequences(text.learned, training.rows, training.model.length, generator)
        ).backward()
        assert used.grad is not None
        gradient = used.grad.to(BF16)
        norm = gradient.float().norm().item()
        if not math.isfinite(norm):
            return losses + [math.nan] * (PARTS - len(losses)), weights.read()
        factor = min(1.0, CLIPPING / (norm + 1e-6))
        moments.step(
            gradient=gradient,
            coefficients=coefficients(step, learning_rate(step, training), factor),
            rounding_key=make_rounding_key(seed, step),
            threads=1,
            **weights.operands,
        )
        watch(step, moments)
        if step % (training.steps // PARTS) == 0:
            losses.append(held_out_loss(weights.output.float(), training, text))
    return losses, weights.read()


def held_out_loss(weights: torch.Tensor, training: Training, text: Text) -> float:
    """The mean over sequences that are the same for every run."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    with torch.no_grad():
        for _ in range(training.held_out_batches):
            batch = sequences(text.held_out, training.rows, training.model.length, generator)
            total += training.model.loss(weights, *batch).item()
    return total / training.held_out_batches
