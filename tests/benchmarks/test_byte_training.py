"""Training of the model of bytes: its learning rate, its weights, its repeatability."""

from __future__ import annotations

import math
from typing import Any

import byte_training
import pytest
import torch
from byte_model import ByteModel, load_text
from byte_training import RATE_PEAK, Run, Training, Weights, learning_rate, train
from state_formats import BF16, FP32, INT8

TRAINING = Training(ByteModel(16, 1, 2, 8), rows=2, steps=40, warmup=10, held_out_batches=1)


def test_the_rate_rises_and_falls_to_a_hundredth() -> None:
    rates = [learning_rate(step, TRAINING) for step in range(1, 41)]
    assert rates.index(max(rates)) == 9
    assert rates[9] == RATE_PEAK
    assert rates[4] == pytest.approx(RATE_PEAK / 2)
    assert rates[24] == pytest.approx(RATE_PEAK * (1 + 1 / 100) / 2)
    assert rates[-1] == pytest.approx(RATE_PEAK / 100)


def test_one_weight_is_moved() -> None:
    usual, moved = (
        byte_training.first_weights(Run("a run", "fp32", moved=change), 3, TRAINING)
        for change in (1.0, 1.01)
    )
    assert torch.equal(usual, usual.to(BF16).float())
    assert (usual != moved).sum() == 1
    assert usual.numel() % 256 == 0


@pytest.mark.parametrize("dtype", [FP32, INT8], ids=str)
def test_weights_are_read_as_they_were_given(dtype: torch.dtype) -> None:
    whole = torch.randn(256, generator=torch.Generator().manual_seed(0))
    weights = Weights(whole, dtype)
    assert torch.equal(weights.output, whole.to(BF16))
    assert torch.allclose(weights.read(), whole, rtol=2.0**-16 if dtype == INT8 else 0, atol=0)


def test_a_run_is_repeated_to_the_bit_and_other_batches_change_it() -> None:
    text = load_text(1 << 14)
    steps: list[int] = []
    results: dict[str, Any] = {}
    for name, batches in (("first", 0), ("again", 0), ("other", 9)):
        run = Run(name, "int8", INT8, batches=batches)
        results[name] = train(run, 0, TRAINING, text, lambda step, _: steps.append(step))
    assert steps == [*range(1, 41)] * 3
    losses, weights = results["first"]
    assert len(losses) == byte_training.PARTS
    assert losses[-1] < losses[0] < math.log(256)
    assert losses == results["again"][0]
    assert torch.equal(weights, results["again"][1])
    assert losses != results["other"][0]


def test_a_run_that_diverges_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_training, "learning_rate", lambda step, _: 1e30 * (step > 20))
    losses, _ = train(Run("a run", "fp32"), 0, TRAINING, load_text(1 << 14), lambda *_: None)
    assert [math.isfinite(loss) for loss in losses] == [True, True, False, False]
