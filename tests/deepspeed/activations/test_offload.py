"""What asks for activations in host memory is served by the drive during a forward pass of ours."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("deepspeed")
import torch

from memascend.deepspeed.activations import offload
from memascend.deepspeed.activations.forward import current
from memascend.streaming.activations.hooks import SavedTensors
from tests.support.activation_streams import activation_stream, numbers

pytestmark = pytest.mark.deepspeed


@pytest.fixture
def saved() -> Iterator[SavedTensors]:
    offload._log_once.cache_clear()
    found = SavedTensors(
        activation_stream(), min_bytes=64, device=torch.device("cpu"), is_of_model=lambda _: False
    )
    token = current.set(found)
    yield found
    current.reset(token)


def test_checkpoint_inputs_go_and_come_back(saved: SavedTensors) -> None:
    found = offload.wrap_offload_engine(lambda: pytest.fail("not asked"))()
    tensors = [numbers(seed) for seed in range(5)]
    packed = [found.offload_input(tensor) for tensor in tensors]
    assert found.offload_input(torch.zeros(3)) is None  # upstream then leaves it where it is
    assert saved.stream.traffic.count == 5
    for seed in reversed(range(5)):
        assert torch.equal(found.restore_input(packed[seed]), numbers(seed))


def test_elsewhere_upstreams_own_serves() -> None:
    assert offload.wrap_offload_engine(lambda: "upstream's")() == "upstream's"
    kept = contextlib.nullcontext()
    assert offload.wrap_save_on_cpu(lambda **_: kept)(pin_memory=True) is kept


def test_transformers_offload_is_left_to_the_hooks_and_told_once(
    saved: SavedTensors, caplog: pytest.LogCaptureFixture
) -> None:
    save = offload.wrap_save_on_cpu(lambda **_: pytest.fail("not asked"))
    with caplog.at_level(logging.INFO, "memascend.deepspeed.activations"):
        for _ in range(3):
            with save(pin_memory=True, device_type="cpu"):
                pass
    assert len(caplog.records) == 1
    assert "transformers' offload of gradient checkpoints" in caplog.text
