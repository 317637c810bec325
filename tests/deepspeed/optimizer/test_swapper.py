"""The surface that stage 3 finds where it looks for its optimizer swapper."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from tests.support.tiled_training import SIZES, Training


def swapper_of(training: Training) -> StreamedSwapper:
    return StreamedSwapper(
        groups=training.groups,
        gradient_stream=training.gradient_stream,
        lock=threading.RLock(),
    )


def parameter(name: str) -> Any:
    return SimpleNamespace(ds_id=name)


def test_master_weights_that_were_streamed_in_stay_and_others_are_stored() -> None:
    training = Training(torch.optim.Adam)
    swapper = swapper_of(training)
    known, new = parameter("4_4"), parameter("10_12")
    values = torch.randn(5000).bfloat16()
    swapper.initialize_parameters([known, new], [torch.zeros(SIZES["4_4"]), values])
    assert torch.equal(training.master("4_4"), training.initial["4_4"])
    found = torch.empty(5000)
    training.groups.get("10_12", 0, found, state=None)
    assert torch.equal(found, values.float())


def test_gradients_of_the_flat_buffer_go_to_the_gradient_stream() -> None:
    training = Training(torch.optim.Adam)
    swapper = swapper_of(training)
    parts = [torch.randn(10, 10), torch.randn(50)]
    swapper.swap_out_gradients(parameter("4_4"), [0, 100], parts)
    found = torch.empty(150)
    training.gradient_stream.get("4_4", 0, found)
    assert torch.equal(found, torch.cat([part.flatten() for part in parts]))


def test_every_tensor_is_on_the_drive_however_small() -> None:
    training = Training(torch.optim.Adam)
    swapper = swapper_of(training)
    assert swapper.is_swappable_tensor(numel=1)
    swapper.pre_backward()
    swapper.post_backward()
    swapper.log_timers()
