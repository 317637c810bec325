"""Which parameter swapper zero.Init gets, and over what."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.streaming_fakes import FakeEvent, FakeMemory, FakeStore

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from memascend.base.device_memory import RELEASED_BYTES_MIN, RELEASED_DIVISOR
from memascend.config.block import parse_block
from memascend.deepspeed.parameters import build
from memascend.deepspeed.parameters.swapper import SWAPPABLE_BYTES_MIN, ParameterSwapper
from memascend.memory.pool import Pool
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.swapped_parameters import on_device, parameter


class AttachmentLike:
    """What building a swapper asks of an attachment."""

    def __init__(self, budget_bytes: int | None) -> None:
        pool = Pool(memory=FakeMemory(), component="slots", budget_bytes=budget_bytes)
        self.runtime = SimpleNamespace(
            parameters=ParameterStream(store=FakeStore(), pool=pool),
            lock=threading.RLock(),
            new_event=FakeEvent,
        )
        self.served: list[str] = []

    @contextmanager
    def serving_aio(self, component: str) -> Iterator[None]:
        self.served.append(component)
        yield
        self.served.append("end")


def made(
    monkeypatch: pytest.MonkeyPatch,
    block: dict[str, Any],
    budget_bytes: int | None,
    ranks: int = 1,
) -> Any:
    """The swapper for a block, and the attachment it was built over."""
    attachment = AttachmentLike(budget_bytes)
    monkeypatch.setattr(build, "attach", lambda *_: attachment)
    ranks_of = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: ranks)
    monkeypatch.setattr(build, "dist", ranks_of)
    ds_config = SimpleNamespace(
        _param_dict={"memascend": block, "aio": {"block_size": 4 * SWAPPABLE_BYTES_MIN}},
        memascend=parse_block(block),
    )

    def stock_swapper(config: Any, dtype: torch.dtype) -> Any:
        assert attachment.served == ["parameter buffers"]
        return SimpleNamespace(dtype=dtype)

    return build.wrap_param_swapper(stock_swapper)(ds_config, torch.bfloat16), attachment


def test_within_a_budget_every_shard_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    swapper, attachment = made(monkeypatch, {"enabled": True}, 1 << 20)
    assert isinstance(swapper, ParameterSwapper)
    assert swapper.memascend_attachment is attachment
    assert swapper.swappable_tensor(numel=1)
    assert swapper.lock is attachment.runtime.lock


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_several_ranks_each_gather_is_begun_late(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    swapper, _ = made(monkeypatch, {"enabled": True}, 1 << 20, ranks=ranks)
    kept = parameter(7, numel=10, swapper=swapper)
    kept.ds_tensor.final_location = None  # in host memory, where nobody waits for it
    kept.ds_tensor.status = PartitionedParamStatus.AVAILABLE
    assert swapper.gathers_on_demand.on_demand([kept]) == ([kept] if ranks > 1 else [])


def test_the_host_runs_ahead_by_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_bytes = 3 * RELEASED_BYTES_MIN
    accelerator = SimpleNamespace(
        current_device_name=lambda: "cpu", total_memory=lambda: limit_bytes * RELEASED_DIVISOR
    )
    monkeypatch.setattr(build, "get_accelerator", lambda: accelerator)
    swapper, _ = made(monkeypatch, {"enabled": True}, 1 << 20)
    events = on_device(swapper)
    for _ in range(5):
        swapper.note_released(RELEASED_BYTES_MIN)
    swapper.wait_for_released()
    assert [event.passed for event in events] == [True] * 2 + [False] * 3


def test_without_a_budget_small_shards_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = {"enabled": True, "streaming": {"parameters": {"enabled": False}}}
    swapper, _ = made(monkeypatch, block, None)
    at_limit = 4 * SWAPPABLE_BYTES_MIN // 2
    assert swapper.swappable_tensor(numel=at_limit)
    assert not swapper.swappable_tensor(numel=at_limit - 1)


def test_without_the_buffer_pool_stock_serves_over_our_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = {"enabled": True, "buffer_pool": {"enabled": False}}
    with caplog.at_level(logging.WARNING):
        swapper, attachment = made(monkeypatch, block, None)
    assert not isinstance(swapper, ParameterSwapper)
    assert swapper.memascend_attachment is attachment
    assert attachment.served == ["parameter buffers", "end"]
    assert "streaming.parameters" in caplog.text
    assert "buffer_pool" in caplog.text
