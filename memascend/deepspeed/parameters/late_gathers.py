"""Gathers that begin when what they gather is needed, not when DeepSpeed asks for them.

DeepSpeed gathers the parameters of the next modules before it lets the current one compute. A
parameter that is still being read, or that the optimizer has still to write, would hold that up:
its gather is noted instead, and begins when the module is fetched that needs it. Until then
DeepSpeed takes the parameter to be in flight, and its shard is like any other that was read ahead:
it gives way to what is needed sooner, and is read again then. Where DeepSpeed waits without a
module, it lets go of what it gathered ahead, and nothing is gathered. Where a script uses a
parameter sooner than its module does, or gathers it by hand, its gather begins and is waited for.

The gathers of a rank that is alone are copies: those of what has arrived begin sooner, at the first
gather or wait behind its arrival. Several ranks have to begin theirs in the same order and at the
same places, but their drives are not equally fast, and which parameter of a module is waited for
first differs between them, as DeepSpeed has these in a set. So with several ranks every gather of
the coordinator is noted, and with the first wait for a module those of all of its parameters begin,
as one.

A gather begins on the stream that it was asked for on, whoever begins it: DeepSpeed waits for that
one, and a script may have made another one current.
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
#: Gathers a list, and returns a handle for all of it; gives up all of it when it fails.
Begin = Callable[[Sequence[Parameter]], Any]


class Swapper(Protocol):
    """What is asked of whoever reads the shards."""

    lock: AbstractContextManager[Any]

    def late(self, params: Iterable[Parameter]) -> list[Parameter]:
        """Return those whose gathers would wait for the drive or the optimizer's walk."""

    def wait_for_updates(self, params: Iterable[Parameter]) -> None:
        """Return when the optimizer's walk has given these parameters their new values."""

    def give_up(self, params: Sequence[Parameter]) -> None:
        """Have parameters as they were before a gather that failed, whatever it had come to."""


class LateGather:
    """The handle of one parameter whose gather has not begun, or has meanwhile, or has failed."""

    def __init__(self, gathers: LateGathers, param: Parameter, begin: Begin) -> None:
        self.param = param
        self.begin = begin
        self.begun: Any = None
        self.stream = stream_here()
        self._gathers = gathers

    def wait(self, **keywords: Any) -> None:
        """Wait as DeepSpeed's coordinator does; return at once if the gather has failed.

        It does not have this handle any more: behind an error the parameter is absent. So it is
        where the coordinator fetches for no module, and nobody has begun the gather.
        """
        try:
            self._gathers.begin_awaited(self.param)
            if self.begun is not None:
                self.begun.wait(**keywords)
        except BaseException:
            self._gathers.give_up(self)
            raise


class GatherHandles:
    """The handle of a list: of one gather that has begun, and of late ones."""

    def __init__(self, gathers: LateGathers, begun: Any, late: Iterable[LateGather]) -> None:
        self._gathers = gathers
        self._begun = begun
        self._late = {one.param.ds_id: one for one in late}

    def of(self, param: Parameter) -> Any:
        """Return the handle of one parameter of the list."""
        return self._late.get(param.ds_id, self._begun)

    def wait(self, **keywords: Any) -> None:
        """Gather and wait for all of the list."""
        if self._begun is not None:
            self._begun.wait(**keywords)
        late = [one.param for one in self._late.values()]
        try:
            self._gathers.begin(late)
        except BaseException:
            self._gathers.withdraw(late)
            raise
        for one in self._late.values():
            one.wait(**keywords)


class Fetching(threading.local):
    """The needs of the module that the coordinator fetches parameters for; one for each thread.

    Parameters of several models may be among them. Each part is the late gathers of a swapper, and
    the ids of its parameters; the order of parts is the same on every rank.
    """

    needed: Sequence[tuple[LateGathers, frozenset[int]]] | None = None


class LateGathers:
    """Of one swapper. Any thread may call; the swapper's lock is held while gathers begin."""

    def __init__(self, swapper: Swapper, *, is_alone: bool) -> None:
        """Begin with none.

        Args:
            swapper: Reads the shards.
            is_alone: Whether this is the only rank.
        """
        self._swapper = swapper
        self._is_alone = is_alone
        self._noted: dict[int, LateGather] = {}  # by ds_id, in the order in which they were noted
        self._registries: dict[int, Any] = {}  # by ds_id: DeepSpeed's, with handles by parameter
        self.fetching = Fetching()

    def late(self, absent: Iterable[Parameter]) -> list[Parameter]:
        """Return those of a list whose gathers are to be noted; with several ranks all."""
        if not self._is_alone:
            return list(absent)
        # What nobody reads yet is needed now: DeepSpeed has read whatever it gathers ahead.
        unread = PartitionedParamStatus.NOT_AVAILABLE
        return self._swapper.late(p for p in absent if p.ds_tensor.status is not unread)

    def note(self, params: Iterable[Parameter], begin: Begin) -> list[LateGather]:
        """Have absent parameters in flight, as DeepSpeed sees them, and gather them later."""
        gathers = [LateGather(self, param, begin) for param in params]
        with self._swapper.lock:
            for one in gathers:
                self._noted[one.param.ds_id] = one
                one.param.ds_status = ZeroParamStatus.INFLIGHT
        return gathers

    def note_registry(self, param: Parameter, registry: Any) -> None:
        """Remember where DeepSpeed has the handle of a parameter until it waits for it."""
        self._registries[param.ds_id] = registry

    def withdraw(self, params: Iterable[Parameter]) -> None:
        """Have parameters absent again whose gathers have not begun."""
        with self._swapper.lock:
            for param in params:
                if param.ds_id in self._noted:
                    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                    del self._noted[param.ds_id]

    def give_up(self, gather: LateGather) -> None:
        """Have a parameter absent again, and all that is being gathered together with it."""
        self.withdraw([gather.param])
        if gather.begun is not None and gather.param.ds_status is ZeroParamStatus.INFLIGHT:
            gather.begun.give_up()

    def begin(self, needed: Iterable[Parameter] = ()) -> None:
        """Begin the gathers of what is needed and, on a rank that is alone, of what is here.

        Raises:
            StoreError: A read failed, or the walk did.
        """
        self._begin_of({param.ds_id for param in needed})

    def is_ahead(self, param: Parameter) -> bool:
        """Check if DeepSpeed has gathered a parameter ahead, and not waited for it yet."""
        return param in self._registries.get(param.ds_id, ())

    def finish(self, params: Iterable[Parameter]) -> None:
        """Have those here now that DeepSpeed gathers ahead; it does not wait for them any more.

        Raises:
            StoreError: A read failed, or the walk did.
        """
        listed, here = list(params), stream_here()
        self.begin(listed)
        for param in filter(self.is_ahead, listed):
            handle = self._registries[param.ds_id].pop(param)
            with on_stream(handle.stream):  # as DeepSpeed's coordinator does
                handle.wait()
            if here != handle.stream:
                here.wait_stream(handle.stream)

    def begin_awaited(self, param: Parameter) -> None:
        """Begin the gather of a parameter that the coordinator waits for, and what goes with it.

        Raises:
            StoreError: A read failed, or the walk did.
        """
        needed = self.fetching.needed
        if needed is None:
            self.withdraw([param])
        elif self._is_alone:
            self._begin_of({param.ds_id})
        else:
            for gathers, ids in needed:
                gathers._begin_of(ids)

    def _begin_of(self, needed_ids: AbstractSet[int]) -> None:
        # What is needed and not noted another thread may be about to begin: with the lock.
        if not (needed_ids or (self._noted and self._is_alone)):
            return
        # Before the lock is taken: hooks of other threads want it meanwhile.
        noted = [g.param for g in list(self._noted.values()) if g.param.ds_id in needed_ids]
        self._swapper.wait_for_updates(noted)
        with self._swapper.lock:
            streams: dict[Any, list[LateGather]] = {}
            for one in self._due(needed_ids):
                streams.setdefault(one.stream, []).append(one)
            for stream, gathers in streams.items():
                with on_stream(stream):
                    self._begin(gathers)

    def _due(self, needed_ids: AbstractSet[int]) -> list[LateGather]:
        """Return what is noted and needed and, on a rank that is alone, what is here."""
        noted = self._noted.values()
        waiting = [one.param for one in noted if one.param.ds_id not in needed_ids]
        late = self._swapper.late(waiting) if self._is_alone else waiting
        late_ids = {param.ds_id for param in late}
        return [one for one in noted if one.param.ds_id not in late_ids]

    def _begin(self, gathers: Sequence[LateGather]) -> None:
        params = [one.param for one in gathers]
        try:
            for one in gathers:
                del self._noted[one.param.ds_id]
                one.param.ds_status = ZeroParamStatus.NOT_AVAILABLE
            handle = gathers[0].begin(params)
            for one in gathers:
                one.begun = handle
        except BaseException:
            for one in gathers:
                self._noted.pop(one.param.ds_id, None)
                one.begun = None
            self._swapper.give_up(params)
            raise
