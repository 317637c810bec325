"""Gathers on demand begin when a module needs its parameters, not when DeepSpeed prefetches them.

DeepSpeed gathers the parameters of the next modules before the current module computes. A parameter
that is still being read, or that the optimizer has yet to write, would delay it. So its gather is
noted, and begins when DeepSpeed fetches the module that needs it. Until then DeepSpeed sees the
parameter as in flight, and its shard is like any other that was read ahead: if the slot is needed
sooner it is evicted, and read again later. If DeepSpeed waits outside of a fetch it only releases
prefetched parameters, so the gather is dropped. If a script uses or gathers a parameter before its
module does, the gather begins and is waited for.

With one rank a gather is a copy: it begins at the first gather or wait after its shard has arrived.
Several ranks must begin their gathers in the same order and at the same places, but their drives
differ in speed, and they wait for the parameters of a module in different orders, since DeepSpeed
keeps these in a set. So with several ranks every gather of the coordinator is noted, and at the
first wait for a module the gathers of all its parameters begin, as one.

A gather begins on the stream on which DeepSpeed requested it: DeepSpeed waits for that stream, and
a script may have made another one current.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, Protocol

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters.device import on_stream, stream_here

Parameter = Any
#: Gathers a list and returns one handle for it; if it fails, none of the list is gathered.
Start = Callable[[Sequence[Parameter]], Any]


class Swapper(Protocol):
    """The methods of the parameter swapper that gathers on demand use."""

    lock: AbstractContextManager[Any]

    def would_wait(self, params: Iterable[Parameter]) -> list[Parameter]:
        """Return the parameters whose gathers would wait for the drive or the optimizer's walk."""

    def wait_for_updates(self, params: Iterable[Parameter]) -> None:
        """Wait until the optimizer's walk has written these parameters."""

    def give_up(self, params: Sequence[Parameter]) -> None:
        """Make the parameters of a failed gather absent again."""


class GatherOnDemand:
    """The handle of one parameter whose gather is deferred; `started` is None until it starts."""

    def __init__(self, gathers: GathersOnDemand, param: Parameter, start: Start) -> None:
        self.param = param
        self.start = start
        self.started: Any = None
        self.stream = stream_here()
        self._gathers = gathers

    def wait(self, **keywords: Any) -> None:
        """Start the gather if needed, and wait for it, as DeepSpeed's coordinator does.

        The parameter is absent on return if the gather has failed before, or if it has not begun
        and the coordinator waits outside of a fetch. An error makes the parameter absent too.
        """
        try:
            self._gathers.start_awaited(self.param)
            if self.started is not None:
                self.started.wait(**keywords)
        except BaseException:
            self._gathers.give_up(self)
            raise


class GatherHandles:
    """The handle of a list: one gather that has started, and deferred ones."""

    def __init__(
        self, gathers: GathersOnDemand, started: Any, on_demand: Iterable[GatherOnDemand]
    ) -> None:
        self._gathers = gathers
        self._started = started
        self._on_demand = {one.param.ds_id: one for one in on_demand}

    def of(self, param: Parameter) -> Any:
        """Return the handle of one parameter of the list."""
        return self._on_demand.get(param.ds_id, self._started)

    def wait(self, **keywords: Any) -> None:
        """Gather and wait for all of the list."""
        if self._started is not None:
            self._started.wait(**keywords)
        deferred = [one.param for one in self._on_demand.values()]
        try:
            self._gathers.start(deferred)
        except BaseException:
            self._gathers.withdraw(deferred)
            raise
        for one in self._on_demand.values():
            one.wait(**keywords)


class Fetching(threading.local):
    """The parameters needed by the module that is being fetched; one for each thread.

    They may belong to several models: `needed` has, for each swapper, its gathers on demand and the
    ids of its parameters, in the same order on every rank. None outside of a fetch.
    """

    needed: Sequence[tuple[GathersOnDemand, frozenset[int]]] | None = None


class GathersOnDemand:
    """Those of one swapper. Any thread may call; gathers begin under the swapper's lock."""

    def __init__(self, swapper: Swapper, *, is_alone: bool) -> None:
        """Note none yet.

        Args:
            swapper: Reads the shards.
            is_alone: Whether this is the only rank.
        """
        self._swapper = swapper
        self._is_alone = is_alone
        self._deferred: dict[int, GatherOnDemand] = {}  # by ds_id, oldest first
        self._registries: dict[int, Any] = {}  # by ds_id: DeepSpeed's registry of handles
        self.fetching = Fetching()

    def on_demand(self, absent: Iterable[Parameter]) -> list[Parameter]:
        """Return the parameters whose gathers are to be noted; with several ranks all of them."""
        if not self._is_alone:
            return list(absent)
        # DeepSpeed reads a shard before it prefetches the gather: an unread one is needed now.
        unread = PartitionedParamStatus.NOT_AVAILABLE
        return self._swapper.would_wait(p for p in absent if p.ds_tensor.status is not unread)

    def defer(self, params: Iterable[Parameter], start: Start) -> list[GatherOnDemand]:
        """Mark absent parameters as in flight, to be gathered later with `start`."""
        gathers = [GatherOnDemand(self, param, start) for param in params]
        with self._swapper.lock:
            for one in gathers:
                self._deferred[one.param.ds_id] = one
                one.param.ds_status = ZeroParamStatus.INFLIGHT
        return gathers

    def note_registry(self, param: Parameter, registry: Any) -> None:
        """Note the registry in which DeepSpeed keeps a parameter's handle until it waits."""
        self._registries[param.ds_id] = registry

    def withdraw(self, params: Iterable[Parameter]) -> None:
        """Make parameters absent again, if their gathers have not begun."""
        with self._swapper.lock:
            for param in params:
                if param.ds_id in self._deferred:
                    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                    del self._deferred[param.ds_id]

    def give_up(self, gather: GatherOnDemand) -> None:
        """Make a parameter absent again, and all parameters of the same gather."""
        self.withdraw([gather.param])
        if gather.started is not None and gather.param.ds_status is ZeroParamStatus.INFLIGHT:
            gather.started.give_up()

    def start(self, needed: Iterable[Parameter] = ()) -> None:
        """Start the gathers of needed parameters; with one rank, also of those that have arrived.

        Raises:
            StoreError: A read failed, or the walk did.
        """
        self._start_of({param.ds_id for param in needed})

    def is_prefetched(self, param: Parameter) -> bool:
        """Return whether DeepSpeed has prefetched a parameter and not waited for it yet."""
        return param in self._registries.get(param.ds_id, ())

    def finish(self, params: Iterable[Parameter]) -> None:
        """Finish the gathers of prefetched parameters; DeepSpeed no longer waits for them.

        Raises:
            StoreError: A read failed, or the walk did.
        """
        listed, here = list(params), stream_here()
        self.start(listed)
        for param in filter(self.is_prefetched, listed):
            registry = self._registries[param.ds_id]
            handle = registry[param]
            with on_stream(handle.stream):  # as DeepSpeed's coordinator does
                handle.wait()
            if here != handle.stream:
                here.wait_stream(handle.stream)
            registry.pop(param, None)  # last, so that a wait after Ctrl-C finds the handle

    def start_awaited(self, param: Parameter) -> None:
        """Start the gather of a parameter for which the coordinator waits; see GatherOnDemand.wait.

        With several ranks begin those of all parameters of the fetched module.

        Raises:
            StoreError: A read failed, or the walk did.
        """
        needed = self.fetching.needed
        if needed is None:
            self.withdraw([param])
        elif self._is_alone:
            self._start_of({param.ds_id})
        else:
            for gathers, ids in needed:
                gathers._start_of(ids)

    def _start_of(self, needed_ids: AbstractSet[int]) -> None:
        # Take the lock even if no needed id is noted: another thread may be about to begin it.
        if not (needed_ids or (self._deferred and self._is_alone)):
            return
        # Without the lock: hooks of other threads need it meanwhile.
        noted = [g.param for g in list(self._deferred.values()) if g.param.ds_id in needed_ids]
        self._swapper.wait_for_updates(noted)
        with self._swapper.lock:
            streams: dict[Any, list[GatherOnDemand]] = {}
            for one in self._due(needed_ids):
                streams.setdefault(one.stream, []).append(one)
            for stream, gathers in streams.items():
                with on_stream(stream):
                    self._start(gathers)

    def _due(self, needed_ids: AbstractSet[int]) -> list[GatherOnDemand]:
        """Return noted gathers that are needed; with one rank, also those that have arrived."""
        noted = self._deferred.values()
        waiting = [one.param for one in noted if one.param.ds_id not in needed_ids]
        still_waiting = self._swapper.would_wait(waiting) if self._is_alone else waiting
        waiting_ids = {param.ds_id for param in still_waiting}
        return [one for one in noted if one.param.ds_id not in waiting_ids]

    def _start(self, gathers: Sequence[GatherOnDemand]) -> None:
        params = [one.param for one in gathers]
        try:
            for one in gathers:
                del self._deferred[one.param.ds_id]
                one.param.ds_status = ZeroParamStatus.NOT_AVAILABLE
            handle = gathers[0].start(params)
            for one in gathers:
                one.started = handle
        except BaseException:
            for one in gathers:
                self._deferred.pop(one.param.ds_id, None)
                one.started = None
            self._swapper.give_up(params)
            raise
