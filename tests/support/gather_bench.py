"""Parameters that are gathered ahead, as DeepSpeed's coordinator does. Needs DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, _no_gather_coalesced

from memascend.deepspeed.parameters.gather import (
    wrap_all_gather,
    wrap_convert,
    wrap_fetch,
    wrap_register,
)
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.streaming.background import BackgroundStep
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.streaming_fakes import CountedPool, FakeStore
from tests.support.swapped_parameters import NUMEL, WatchedLock, parameter

ABSENT, FLYING, THERE = (
    ZeroParamStatus.NOT_AVAILABLE,
    ZeroParamStatus.INFLIGHT,
    ZeroParamStatus.AVAILABLE,
)
#: A coordinator that has traced nothing yet.
TRACELESS = SimpleNamespace(is_complete_trace=lambda: False)


class Registry(dict[Any, Any]):
    """DeepSpeed's, by id: a parameter here is no key of a dict."""

    def __contains__(self, param: Any) -> bool:
        return super().__contains__(getattr(param, "ds_id", param))

    def __getitem__(self, param: Any) -> Any:
        return super().__getitem__(getattr(param, "ds_id", param))

    def pop(self, param: Any, *default: Any) -> Any:  # type: ignore[override]
        return super().pop(getattr(param, "ds_id", param), *default)


@wrap_register
def register(registry: Any, param: Any, handle: Any) -> None:
    assert param not in registry, "already in registry"
    registry[param.ds_id] = handle


class Bench:
    """Parameters 0, 1, 2 and so on over a drive that finishes a read when it is waited for."""

    def __init__(self, *, is_alone: bool = True, count: int = 3) -> None:
        self.store = FakeStore()
        self.walk = BackgroundStep()
        self.lock = WatchedLock()
        self.swapper = ParameterSwapper(
            attachment=SimpleNamespace(),  # type: ignore[arg-type]
            stream=ParameterStream(store=self.store, pool=CountedPool(), background=self.walk),
            dtype=torch.bfloat16,
            lock=self.lock,
            is_alone=is_alone,
        )
        self.out_of_memory = False
        self.before_gather: Callable[[], object] = int
        self.gathered: list[list[int]] = []
        self.params = [parameter(ds_id, swapper=self.swapper) for ds_id in range(count)]
        for param in self.params:
            param.ds_shape, param.ds_numel = (NUMEL,), NUMEL
            buffer = self.swapper.get_buffer(param, NUMEL)
            param.ds_tensor.data = buffer.fill_(param.ds_id + 1).data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
            self.swapper.swap_out_and_release([param])
            wrap_convert(self._convert)(None, param)
        self.store.tickets.clear()
        self.registry = Registry()

    def _convert(self, init: Any, param: Any) -> None:
        def all_gather_coalesced(params: Any, **_: Any) -> Any:
            self.before_gather()
            self.gathered.append([param.ds_id for param in params])
            if self.out_of_memory:
                raise torch.OutOfMemoryError("no memory left")
            return _no_gather_coalesced(list(params))

        def all_gather(init: Any, param_list: Any, **_: Any) -> None:
            if param_list:
                _no_gather_coalesced(param_list).wait()

        param.all_gather_coalesced = all_gather_coalesced
        gather = wrap_all_gather(all_gather)
        param.all_gather = lambda param_list=None: gather(None, param_list or [param])

    def prefetch(self, *indexes: int) -> None:
        self.swapper.swap_in([self.params[index] for index in indexes], async_op=True)

    def gather(self, *indexes: int) -> Any:
        """As the coordinator does; what it registers for each is in `registry`."""
        params = [self.params[index] for index in indexes]
        handle = params[0].all_gather_coalesced(params, quantize=False)
        for param in params:
            assert param.ds_status is FLYING
            register(self.registry, param, handle)
        return handle

    def wait(self, *indexes: int) -> None:
        """As the coordinator does, who has no handle any more whatever becomes of the wait."""

        def original(*_: object) -> None:
            for index in indexes:
                self.registry.pop(index).wait(handle_dependency=True)

        wrap_fetch(original)(TRACELESS, self.module(*indexes), True, False)

    def let_go(self, index: int) -> None:
        """As the coordinator does without a module."""
        self.registry.pop(index).wait()

    def module(self, *indexes: int) -> Any:
        listed = [(str(index), self.params[index]) for index in indexes]
        return SimpleNamespace(
            named_parameters=lambda recurse: listed, ds_external_parameters=lambda: []
        )

    def finish_read(self, index: int) -> None:
        for ticket in self.store.tickets:
            if ticket.key == f"param.{index}":
                ticket.finish()

    def pending(self) -> list[str]:
        return [ticket.key for ticket in self.store.tickets if not ticket.finished]

    def statuses(self) -> list[ZeroParamStatus]:
        return [param.ds_status for param in self.params]

    def is_whole(self, index: int) -> bool:
        data = self.params[index].data
        return data.numel() == NUMEL and bool((data == index + 1).all())
