"""Adapters of peft run in slices with the layers that they are in."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.sliced_models import assert_close, batch, make, run

peft = pytest.importorskip("peft")

TASK = {"task_type": "CAUSAL_LM"}


def adapted(config: Any) -> tuple[Any, dict[str, Any]]:
    base: Any = make("llama-untied")
    inputs = batch(base)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config)
    for name, param in model.named_parameters():
        if param.requires_grad and not param.any():  # else the gradients of others are zero
            torch.nn.init.normal_(param, std=0.02)
        assert param.requires_grad == ("lora" in name or "ia3" in name or "prompt" in name)
    return model.train(), inputs


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, target_modules="all-linear", **TASK),
        peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, **TASK),
        peft.IA3Config(**TASK),
    ],
    ids=["lora", "dora", "ia3"],
)
def test_adapters_in_layers_get_the_gradients_of_the_whole_batch(
    config: Any, caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    model, inputs = adapted(config)
    loss, expected = run(model, inputs, 0)
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert "computes the whole batch" not in caplog.text
    # Two layers, the frozen norm behind them, which would save its input otherwise, and the head.
    assert passes == [("forward", [0, 1, 2])] * 4 + [("backward", [0, 1, 2])] * 4
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)


def test_prompts_that_are_learned_get_the_gradients_of_the_whole_batch(passes: list[Any]) -> None:
    """The model is given embeddings, and labels for the prompt as well."""
    model, inputs = adapted(peft.PromptTuningConfig(num_virtual_tokens=3, **TASK))
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, 3)
    assert ("backward", [0, 1, 2]) in passes
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)
