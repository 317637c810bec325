"""Parameters as the swapper sees them, and the device that it asks. Needs DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters import device as accelerated
from tests.support.streaming_fakes import FakeEvent

NUMEL = 2048  # a page of them


def parameter(ds_id: int, numel: int = NUMEL, location: str = "nvme") -> Any:
    shard: Any = torch.zeros(1, dtype=torch.bfloat16)
    shard.ds_numel, shard.final_location = numel, location
    shard.status = PartitionedParamStatus.NOT_AVAILABLE
    return SimpleNamespace(
        ds_id=ds_id,
        ds_tensor=shard,
        ds_status=ZeroParamStatus.NOT_AVAILABLE,
        dtype=torch.bfloat16,
        data=torch.zeros(0, dtype=torch.bfloat16),
    )


def on_device(monkeypatch: pytest.MonkeyPatch, *, synchronous: bool = False) -> list[FakeEvent]:
    """Have the accelerator be such a device, and return the list of its events."""
    events: list[FakeEvent] = []

    def new_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    device = SimpleNamespace(is_synchronized_device=lambda: synchronous, Event=new_event)
    monkeypatch.setattr(accelerated, "get_accelerator", lambda: device)
    return events
