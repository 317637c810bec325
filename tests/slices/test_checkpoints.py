"""Every way to call a checkpoint function is found."""

from __future__ import annotations

import functools
import inspect
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


def by_attribute_of_deepspeed(name: str, layers: Any, states: torch.Tensor) -> torch.Tensor:
    checkpointing = sys.modules["deepspeed.runtime.activation_checkpointing.checkpointing"]
    for layer in layers:
        states = getattr(checkpointing, name)(layer, states)
    return states


def with_captured(layers: Any, states: torch.Tensor) -> torch.Tensor:
    """As a script that keeps a mask of the batch beside the arguments."""
    mask = torch.linspace(0.5, 1.5, len(states))[:, None, None]

    def run(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
        return layer(states * mask)

    for layer in layers:
        states = torch.utils.checkpoint.checkpoint(run, layer, states, use_reentrant=False)
    return states


def with_early_stop(layers: Any, states: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        states = torch.utils.checkpoint.checkpoint(
            layer, states, use_reentrant=False, early_stop=False
        )
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
def of_a_file(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a function that calls a name of a file that has no class of the model."""
    file: Any = types.ModuleType("a_helper_of_a_script")
    monkeypatch.setitem(sys.modules, file.__name__, file)

    def make(function: Any, **options: Any) -> Callable[..., torch.Tensor]:
        file.checkpoint = function

        def run(layers: Any, states: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                states = file.checkpoint(layer, states, **options)
            return states

        return run

    return make


@pytest.mark.parametrize("how", ["attribute", "early stop", "helper", "partial", "wrapper"])
def test_a_layer_is_cut_however_its_checkpoint_is_called(
    how: str, of_a_file: Any, passes: list[Any]
) -> None:
    torch.manual_seed(0)
    run = {
        "attribute": by_attribute,
        "early stop": with_early_stop,
        "helper": of_a_file(torch_checkpoint.checkpoint, use_reentrant=False),
    }.get(how)
    model = Calls(of_a_file(_OFTEN) if how == "partial" else run)
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


class ChecksLoss(Plain):
    """Checkpoints its loss, as a function or a module, and its layers if it is told to."""

    def __init__(self, *, of_module: bool, layers: bool) -> None:
        super().__init__(reentrant=False)
        self.loss = nn.MSELoss() if of_module else nn.functional.mse_loss
        self.run = by_attribute if layers else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embedding(ids)
        if self.run is not None:
            states = self.run(self.layers, states)
        loss: torch.Tensor = torch_checkpoint.checkpoint(
            self.loss, states, torch.ones_like(states), use_reentrant=False
        )
        return loss


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("of_module", [False, True])
def test_a_loss_that_is_checkpointed_is_no_layer(
    of_module: bool, layers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = ChecksLoss(of_module=of_module, layers=layers)
    expected = trained(model, 0)
    with caplog.at_level(logging.WARNING):
        found = trained(model, 3)
    assert ("none of its layers is checkpointed" in caplog.text) == (not layers)
    said = "MSELoss" if of_module else "mse_loss"
    assert caplog.text.count(f"{said} computes the whole batch at once") == 1
    assert_close(found, expected)


def test_a_function_that_has_tensors_beside_its_arguments_stays_whole(
    caplog: pytest.LogCaptureFixture, passes: list[Any]
) -> None:
    torch.manual_seed(0)
    model = Calls(with_captured)
    expected = trained(model, 0)
    with caplog.at_level(logging.WARNING):
        found = trained(model, 3)
    assert "with_captured.<locals>.run computes the whole batch at once" in caplog.text
    assert_close(found, expected)


def test_the_options_of_the_function_can_be_told_during_a_pass() -> None:
    """torch.compile reads them."""
    outside = inspect.signature(torch_checkpoint.checkpoint)
    model = Calls(by_attribute)
    with sliced(model).running((torch.zeros(ROWS, LENGTH).long(),), {}, lambda _: 3):
        assert type(torch_checkpoint.checkpoint).__name__ == "SlicedCheckpoint"
        assert inspect.signature(torch_checkpoint.checkpoint) == outside


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
def test_a_call_of_deepspeeds_checkpoint_by_attribute_is_cut(passes: list[Any], name: str) -> None:
    pytest.importorskip("deepspeed")
    torch.manual_seed(0)
    model = Calls()
    expected = trained(model, 0)
    model.run = functools.partial(by_attribute_of_deepspeed, name)
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
