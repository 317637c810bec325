"""Layers that a script compiles in place run in slices."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.support.sliced_models import (
    LENGTH,
    ROWS,
    Plain,
    assert_close,
    batch,
    gradients,
    make,
    run,
    sliced,
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("backend", "reentrant"), [("eager", True), ("aot_eager", False)])
def test_layers_that_are_compiled_in_place_are_cut(
    backend: str, reentrant: bool, passes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Plain(reentrant=reentrant)
    ids = torch.randint(50, (ROWS, LENGTH))
    model(ids).backward()
    expected = gradients(model)
    for layer in model.layers:
        layer.compile(backend=backend)
    runs = sliced(model, slices_head=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            passes.clear()
            with runs.running((ids,), {}, lambda _: 3):
                loss = model(ids)
            loss.backward()
            assert_close(gradients(model), expected)
            assert [numbers for _, numbers in passes] == [[0, 1, 2]] * 6
    assert caplog.text == ""


@pytest.mark.full
def test_layers_of_transformers_that_are_compiled_in_place_are_cut(
    passes: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Their checkpoint function is called in the midst of what is compiled."""
    model = make("llama-untied")
    inputs = batch(model)
    loss, expected = run(model, inputs, 0)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    passes.clear()
    with caplog.at_level(logging.WARNING):
        found_loss, found = run(model, inputs, 3)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)
    assert [numbers for _, numbers in passes] == [[0, 1, 2]] * 10
    assert not [one for one in caplog.messages if "whole batch" in one]


def test_a_proof_compiles_nothing() -> None:
    """A slice of another size would have its layer compiled once more, for any size."""
    model, sizes = Plain(reentrant=False), []

    def backend(module: Any, inputs: list[torch.Tensor]) -> Any:
        sizes.append({len(one) for one in inputs if torch.is_tensor(one) and one.dim() == 3})
        return module.forward

    model.layers[0].compile(backend=backend)
    ids = torch.randint(50, (ROWS, LENGTH))
    with sliced(model).running((ids,), {}, lambda _: 3):
        model(ids)
    assert sizes == [{2}]
