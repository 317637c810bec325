"""Parameters whose gathers note what they are given, and their swapper. Needs DeepSpeed."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters.gather import wrap_all_gather, wrap_convert
from memascend.deepspeed.parameters.gathers_on_demand import GathersOnDemand
from memascend.deepspeed.parameters.swapper import ParameterSwapper


class TwoAtATime(ParameterSwapper):
    """Cuts into turns of two, and notes what is asked of it."""

    def __init__(self, *, is_alone: bool = False, begins_late: bool = False) -> None:
        self.is_alone = is_alone
        self.calls: list[tuple[str, list[int]]] = []
        self.components: list[str | None] = []
        self.waits = 0
        self.lock = threading.RLock()
        self.gathers_on_demand = GathersOnDemand(self, is_alone=not begins_late)
        self.updated: list[list[int]] = []
        self.released: list[int] = []
        self.memascend_attachment = SimpleNamespace(host_buffers=self._host_buffers)  # type: ignore[assignment]

    @contextmanager
    def _host_buffers(self, component: str | None) -> Any:
        self.components.append(component)
        yield

    def turns(self, params: Any) -> Any:
        listed = sorted(params, key=lambda param: param.ds_id)
        for begin in range(0, len(listed), 2):
            yield listed[begin : begin + 2]

    def swap_in(self, params: Any, async_op: bool = True, swap_in_buffers: Any = None) -> None:
        assert not async_op
        self.note("read", params)

    def start_copies(self, params: Any) -> None:
        self.note("copy", params)

    def after_gather(self, params: Any) -> None:
        self.note("let go", params)

    def would_wait(self, params: Any) -> Any:
        return []  # all is here

    def wait_for_updates(self, params: Any) -> None:
        self.updated.append([param.ds_id for param in params])

    def wait_for_released(self) -> None:
        self.waits += 1

    def note_released(self, nbytes: int) -> None:
        self.released.append(nbytes)

    def give_up(self, params: Any) -> None:
        self.note("give up", params)

    def stage_for_update(self, param: Any) -> None:
        self.note("stage", [param])

    def note(self, what: str, params: Any) -> None:
        self.calls.append((what, [param.ds_id for param in params]))


def parameters(swapper: Any, count: int, first_id: int = 0) -> list[Any]:
    """As zero.Init converts them; their gathers note what they are given."""
    params = []
    for ds_id in range(first_id, first_id + count):
        param = SimpleNamespace(
            ds_id=ds_id,
            ds_status=ZeroParamStatus.NOT_AVAILABLE,
            ds_tensor=SimpleNamespace(final_location="nvme", device=torch.device("cpu")),
            data=torch.zeros(8),
            nvme_swapper=swapper,
        )
        wrap_convert(convert)(None, param)
        params.append(param)
    return params


def gather_list(
    init: Any, param_list: Any, async_op: bool = False, hierarchy: int = 0
) -> list[str]:
    for one in param_list[:1]:
        one.nvme_swapper.note("gather", param_list)
    return [f"handle of {len(param_list)}"]


def convert(init: Any, param: Any) -> None:
    def all_gather_coalesced(params: Any, **keywords: Any) -> Any:
        listed = list(params)
        param.nvme_swapper.note("gather", listed)
        wait = lambda **_: param.nvme_swapper.note("wait", listed)  # noqa: E731
        return SimpleNamespace(params=listed, keywords=keywords, wait=wait)

    def all_gather(param_list: Any = None, **keywords: Any) -> Any:
        return wrap_all_gather(gather_list)(None, param_list or [param], **keywords)

    param.all_gather, param.all_gather_coalesced = all_gather, all_gather_coalesced
