"""Shards of the optimizer's dtype, whatever they were partitioned in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer import recast_parameters as module
from memascend.deepspeed.optimizer.recast_parameters import recast_parameters
from memascend.errors import ConfigError

BF16, FP32 = torch.bfloat16, torch.float32


class Swapper:
    """Ours, as far as it is asked here."""

    def __init__(self) -> None:
        self.recasts: list[tuple[Any, torch.dtype]] = []

    def recast(self, param: Any, dtype: torch.dtype) -> None:
        self.recasts.append((param, dtype))


class Attachment:
    """Notes for which component host buffers are made."""

    def __init__(self) -> None:
        self.components: list[str] = []

    @contextmanager
    def host_buffers(self, component: str) -> Iterator[None]:
        self.components.append(component)
        yield


def shard(dtype: torch.dtype, location: str | None = "nvme") -> Any:
    made: Any = torch.tensor([1.5, 2.0]).to(dtype)
    made.final_location = location
    return SimpleNamespace(ds_tensor=made, nvme_swapper=SimpleNamespace(dtype=dtype))


def store(params: list[Any], attachment: Any = None) -> None:
    recast_parameters(params, FP32, attachment=attachment or Attachment(), pin_memory=False)


@pytest.fixture
def swapper(monkeypatch: pytest.MonkeyPatch) -> Swapper:
    made = Swapper()
    monkeypatch.setattr(module, "swapper_of", lambda param: made)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    return made


def test_on_the_drive_shards_of_other_dtypes_are_stored_anew(
    swapper: Swapper, caplog: pytest.LogCaptureFixture
) -> None:
    params = [shard(FP32), shard(BF16), shard(torch.float16), shard(BF16)]
    store(params)
    assert swapper.recasts == [(param, FP32) for param in params[1:]]
    (line,) = (record.getMessage() for record in caplog.records)
    assert "3 of 4 parameters were partitioned as bfloat16 or float16" in line
    assert "stored in float32" in line


def test_where_all_are_alike_nothing_is_done_or_logged(
    swapper: Swapper, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        store([shard(FP32), shard(FP32, None)])
    assert swapper.recasts == []
    assert caplog.records == []


def test_in_host_memory_a_shard_is_exchanged_for_one_of_ours(swapper: Swapper) -> None:
    param, attachment = shard(BF16, None), Attachment()
    kept = param.ds_tensor
    store([param], attachment)
    assert param.ds_tensor is kept
    assert torch.equal(kept.data, torch.tensor([1.5, 2.0]))
    assert attachment.components == ["small parameters"]
    assert swapper.recasts == []


def test_deepspeeds_own_swapper_cannot_and_is_refused(
    swapper: Swapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "swapper_of", lambda param: None)
    with pytest.raises(ConfigError, match=r"bfloat16 .* float32.*buffer_pool"):
        store([shard(BF16)])


def test_the_stand_in_of_deepspeeds_own_swapper_is_not_taken_for_a_shard(
    swapper: Swapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards there are of the swapper's dtype, and every stand-in is fp16."""
    monkeypatch.setattr(module, "swapper_of", lambda param: None)
    absent = shard(FP32)
    absent.ds_tensor.data = torch.tensor(1).half()
    store([absent])
