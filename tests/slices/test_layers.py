"""Checkpointed layers of any script run in slices, or stay whole with a reason."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.sliced_models import LENGTH, ROWS, Plain, assert_close, gradients, sliced


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_torch_are_cut(reentrant: bool, passes: list[Any]) -> None:
    torch.manual_seed(0)
    model = Plain(reentrant=reentrant)
    ids = torch.randint(50, (ROWS, LENGTH))
    model(ids).backward()
    expected = gradients(model)
    with sliced(model).running((ids,), {}, lambda _: 3):
        loss = model(ids)
    loss.backward()
    assert_close(gradients(model), expected)
    assert [numbers for _, numbers in passes] == [[0, 1, 2]] * 6  # embedding and layers


def test_statistics_of_the_batch_keep_a_layer_whole(caplog: Any, passes: list[Any]) -> None:
    model = Plain(reentrant=False)
    model.layers[0].norm1 = nn.BatchNorm1d(LENGTH)
    ids = torch.randint(50, (ROWS, LENGTH))
    with caplog.at_level(logging.WARNING), sliced(model).running((ids,), {}, lambda _: 3):
        model(ids).backward()
    assert "BatchNorm1d computes statistics of the batch" in caplog.text
    assert len([one for one in passes if one[0] == "forward"]) == 2  # the embedding, a layer
