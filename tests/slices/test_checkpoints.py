"""Every way to call a checkpoint function is found."""

from __future__ import annotations

import functools
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.utils import checkpoint as torch_checkpoint

from tests.support.sliced_models import LENGTH, ROWS, Plain, assert_close, gradients, sliced

_OFTEN = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)


class Calls(Plain):
    """Has a function run its layers."""

    def __init__(self, run: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__(reentrant=False)
        self.run = run

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids)
        if self.run is None:
            for layer in self.layers:
                states = layer(states)
        else:
            states = self.run(self.layers, states)
        return (states[..., 0] * states[..., 1].exp()).mean()


def by_attribute(layers: Any, states: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        states = torch.utils.checkpoint.checkpoint(layer, states, use_reentrant=False)
    return states


def by_attribute_of_deepspeed(layers: Any, states: torch.Tensor) -> torch.Tensor:
    checkpointing = sys.modules["deepspeed.runtime.activation_checkpointing.checkpointing"]
    for layer in layers:
        states = checkpointing.checkpoint(layer, states)
    return states


def in_segments(layers: Any, states: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint.checkpoint_sequential(list(layers), 2, states, use_reentrant=False)


def trained(model: nn.Module, count: int) -> dict[str, torch.Tensor]:
    """The gradients; count 0: without slices."""
    torch.manual_seed(0)
    ids = torch.randint(50, (ROWS, LENGTH))
    if count:
        with sliced(model).running((ids,), {}, lambda _: count):
            loss = model(ids)
    else:
        loss = model(ids)
    loss.backward()
    return gradients(model)


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """A function of a file that has no class of the model."""
    file: Any = types.ModuleType("a_helper_of_a_script")
    file.checkpoint = torch_checkpoint.checkpoint
    monkeypatch.setitem(sys.modules, file.__name__, file)

    def run(layers: Any, states: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            states = file.checkpoint(layer, states, use_reentrant=False)
        return states

    return run


@pytest.mark.parametrize("how", ["attribute", "helper", "wrapper"])
def test_a_layer_is_cut_however_its_checkpoint_is_called(
    how: str, helper: Any, passes: list[Any]
) -> None:
    torch.manual_seed(0)
    model = Calls({"attribute": by_attribute, "helper": helper}.get(how))
    if how == "wrapper":
        model.layers = nn.ModuleList(map(checkpoint_wrapper.checkpoint_wrapper, model.layers))
    expected = trained(model, 0)
    assert_close(trained(model, 3), expected)
    assert [numbers for _, numbers in passes] == [[0, 1, 2]] * 6  # embedding and layers
    assert torch_checkpoint.checkpoint is _OFTEN.func


def test_a_checkpoint_of_several_modules_stays_whole_and_says_so_once(
    caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    torch.manual_seed(0)
    model = Calls(in_segments)
    expected = trained(model, 0)
    runs = sliced(model)
    ids = torch.randint(50, (ROWS, LENGTH))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with runs.running((ids,), {}, lambda _: 3):
                model(ids).backward()
    model.zero_grad()
    assert caplog.text.count("its function belongs to no module") == 1
    assert "none of its layers is checkpointed" not in caplog.text
    assert_close(trained(model, 3), expected)
    assert {which for which, _ in passes} == {"forward", "backward"}  # the embedding's


@pytest.mark.deepspeed
def test_a_call_of_deepspeeds_checkpoint_by_attribute_is_cut(passes: list[Any]) -> None:
    pytest.importorskip("deepspeed")
    torch.manual_seed(0)
    model = Calls()
    expected = trained(model, 0)
    model.run = by_attribute_of_deepspeed
    assert_close(trained(model, 3), expected)
    assert [numbers for _, numbers in passes] == [[0, 1, 2]] * 6


def test_a_model_that_runs_within_the_pass_of_another_one_is_cut_by_its_own_pass(
    passes: list[Any],
) -> None:
    model, other = Calls(by_attribute), Calls(by_attribute)
    ids = torch.randint(50, (ROWS, LENGTH))
    with sliced(model).running((ids,), {}, lambda _: 3):
        with sliced(other).running((ids,), {}, lambda _: 2):
            other(ids)
        model(ids)
    assert [numbers for _, numbers in passes] == [[0, 1]] * 3 + [[0, 1, 2]] * 3
