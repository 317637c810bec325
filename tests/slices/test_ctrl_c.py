"""A script may catch Ctrl-C, and go on with the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.slices.model import SlicedModel
from tests.support.ctrl_c import interruptions
from tests.support.sliced_models import batch, gradients, make, run, sliced

COUNT = 3


def step(model: Any, slices: SlicedModel, inputs: dict[str, Any]) -> float:
    with slices.running((), inputs, lambda _: COUNT):
        loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach())


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
        for found, right in (
            ((step(model, slices[-1], inputs), gradients(model)), expected),
            (run(model, inputs, 0), whole),
        ):
            assert found[0] == right[0], place
            assert found[1].keys() == right[1].keys(), place
            assert all(torch.equal(one, right[1][name]) for name, one in found[1].items()), place
