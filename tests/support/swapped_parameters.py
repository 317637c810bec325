"""Parameters as the swapper sees them, and the events of a device. Needs DeepSpeed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters.swapper import ParameterSwapper
from tests.support.streaming_fakes import FakeEvent

NUMEL = 2048  # a page of them
PATIENCE_S = 60.0


def parameter(ds_id: int, numel: int = NUMEL, location: str = "nvme", swapper: Any = None) -> Any:
    shard: Any = torch.zeros(1, dtype=torch.bfloat16)
    shard.ds_numel, shard.final_location = numel, location
    shard.status = PartitionedParamStatus.NOT_AVAILABLE
    return SimpleNamespace(
        ds_id=ds_id,
        ds_tensor=shard,
        ds_status=ZeroParamStatus.NOT_AVAILABLE,
        dtype=torch.bfloat16,
        nvme_swapper=swapper,
        data=torch.zeros(0, dtype=torch.bfloat16),
    )


def on_device(swapper: ParameterSwapper) -> list[FakeEvent]:
    """Have a swapper on a device with streams, and return the list of its events."""
    events: list[FakeEvent] = []

    def new_event() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    swapper._new_event = new_event  # type: ignore[assignment]
    return events


class WatchedLock:
    """A reentrant lock that tells when somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def is_held(self) -> bool:
        """Tell whether another thread would have to wait."""
        taken = []

        def take() -> None:
            if self._lock.acquire(blocking=False):
                taken.append(True)
                self._lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(PATIENCE_S)
        return not taken
