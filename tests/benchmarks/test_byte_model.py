"""The model of bytes: that it learns from bytes before each, and from them alone."""

from __future__ import annotations

import math

import pytest
import torch
from byte_model import ByteModel, load_text, sequences

MODEL = ByteModel(width=16, layers=2, heads=2, length=8)


def test_a_loss_is_of_the_bytes_before_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = MODEL.initial(0) * 20
    inputs, next_ = torch.randint(256, (2, 3, 8), generator=generator)
    changed = inputs.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    for end, is_same in ((5, True), (6, False)):
        counted = next_.clone()
        counted[:, end:] = -100  # which cross-entropy leaves out
        losses = [MODEL.loss(weights, given, counted).item() for given in (inputs, changed)]
        assert (losses[0] == losses[1]) == is_same


def test_untrained_weights_know_nothing() -> None:
    inputs, next_ = torch.randint(256, (2, 8, 8), generator=torch.Generator().manual_seed(1))
    loss = MODEL.loss(MODEL.initial(1), inputs, next_).item()
    assert loss == pytest.approx(math.log(256), abs=0.05)


def test_every_weight_has_a_gradient() -> None:
    weights = MODEL.initial(2).requires_grad_()
    assert weights.numel() == MODEL.numel
    inputs = torch.arange(256).view(32, 8)
    MODEL.loss(weights, inputs, (inputs + 1) % 256).backward()
    assert weights.grad is not None
    assert bool((weights.grad != 0).all())


def test_the_text_held_out_is_not_learned() -> None:
    text = load_text(1 << 12)
    assert (text.learned.numel(), text.held_out.numel()) == (3687, 409)
    inputs, next_ = sequences(text.learned, 3, 16, torch.Generator().manual_seed(0))
    assert torch.equal(inputs[:, 1:], next_[:, :-1])
