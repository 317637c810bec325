"""A head in slices gives the loss of the whole batch, without its logits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from memascend.slices.head import MissingLogitsError
from tests.support.sliced_models import ROWS, assert_close, batch, make, run, sliced


def test_logits_exist_for_one_slice_and_are_missed_by_name() -> None:
    model: Any = make("llama-untied")
    inputs = batch(model)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(call[2].shape[0]))
    with sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert seen == [2, 2, 2]
    with pytest.raises(MissingLogitsError, match='"head": false'):
        output.logits  # noqa: B018
    assert getattr(output, "logits", None) is None
    with sliced(model, slices_head=False).running((), inputs, lambda _: 3):
        assert model(**inputs).logits.shape[0] == ROWS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"labels": None}, "is not given labels"),
        ({"return_dict": False}, "return_dict=False"),
    ],
)
def test_a_head_that_is_asked_for_more_stays_whole(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama-untied")
    inputs = batch(model) | changes
    with caplog.at_level(logging.WARNING), sliced(model).running((), inputs, lambda _: 3):
        output = model(**inputs)
    assert reason in caplog.text
    logits = output[1] if "return_dict" in changes else output.logits
    assert logits.shape[0] == ROWS


def test_a_sum_over_items_is_divided_once() -> None:
    model = make("qwen3-untied")
    inputs = batch(model) | {"num_items_in_batch": torch.tensor(77)}
    loss, expected = run(model, inputs, 0)
    found_loss, found = run(model, inputs, 4)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert_close(found, expected)
