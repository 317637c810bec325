"""A script may catch Ctrl-C, and go on with the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memascend.slices.model import SlicedModel
from tests.support.ctrl_c import interruptions
from tests.support.sliced_models import batch, gradients, make, run, sliced

COUNT = 3


def step(model: Any, slices: SlicedModel, inputs: dict[str, Any]) -> float:
    with slices.running((), inputs, lambda _: COUNT):
        loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach())


def evaluate(model: Any, slices: SlicedModel, inputs: dict[str, Any]) -> float:
    with torch.no_grad(), slices.running((), inputs, lambda _: COUNT):
        return float(model(**inputs).loss)


def test_an_evaluation_behind_ctrl_c_that_came_twice_begins_with_what_was_left() -> None:
    model = make("llama-untied")
    inputs = batch(model)
    slices = sliced(model)
    expected = evaluate(model, slices, inputs)
    interrupted = [KeyboardInterrupt(), KeyboardInterrupt()]
    children, base = model._modules, model._modules["model"]

    def stop(*_: Any, **__: Any) -> None:
        slices._replaced._undo.append(lambda: children.update(model=base))
        children["model"] = nn.Identity()
        slices._replaced._undo.append(lambda: interrupted and _raise(interrupted.pop()))
        raise interrupted.pop()

    with pytest.raises(KeyboardInterrupt), slices.running((), inputs, lambda _: COUNT):
        stop()
    assert children["model"] is not base
    assert evaluate(model, slices, inputs) == expected


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "stride",  # a pass is 36,000 lines with proofs
    [pytest.param(2401, marks=pytest.mark.coarse), pytest.param(97, marks=pytest.mark.full)],
)
def test_after_ctrl_c_at_any_line_the_next_pass_is_whole(stride: int) -> None:
    model = make("llama-untied")
    inputs = batch(model)
    whole = run(model, inputs, 0)
    expected = run(model, inputs, COUNT)
    slices: list[SlicedModel] = []

    def make_work() -> Callable[[], object]:
        slices.append(sliced(model))  # which proves layers and head anew
        return lambda: step(model, slices[-1], inputs)

    state = torch.get_rng_state()
    for place in interruptions(make_work, stride):
        model.zero_grad()
        torch.set_rng_state(state)
        assert evaluate(model, slices[-1], inputs) == whole[0], place
        for found, right in (
            ((step(model, slices[-1], inputs), gradients(model)), expected),
            (run(model, inputs, 0), whole),
        ):
            assert found[0] == right[0], place
            assert found[1].keys() == right[1].keys(), place
            assert all(torch.equal(one, right[1][name]) for name, one in found[1].items()), place
