"""Wraps the gather and partition calls of zero.Init for parameters of our swapper.

- A list is split by swapper, since DeepSpeed passes any list to the swapper of its first parameter.
- A gather waits until the optimizer has written the parameters that it reads.
- Slots of gathered parameters are released early.
- A list larger than the pool is gathered in turns; each turn is read as a whole first.
- A gather that fails is undone, so that it can be tried again.
- A parameter that is still being read is gathered later, so that the module before it need not
  wait (gathers_on_demand.py).

Parameters of other swappers go to the stock functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.zero.partition_parameters import (
    ZeroParamStatus,
    _no_gather_coalesced,
)
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from memascend.deepspeed.parameters.device import stream_here
from memascend.deepspeed.parameters.gathers_on_demand import GatherHandles
from memascend.deepspeed.parameters.module_trace import drop_stale_trace
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.errors import ConfigError

Parameter = Any


def swapper_of(param: Parameter) -> ParameterSwapper | None:
    """Return a parameter's swapper if it is ours; None if it has a stock one or none."""
    swapper = getattr(param, "nvme_swapper", None)
    return swapper if isinstance(swapper, ParameterSwapper) else None


def by_swapper(
    params: Iterable[Parameter],
) -> list[tuple[ParameterSwapper | None, list[Parameter]]]:
    """Split parameters by their swapper; None stands for a stock one or none.

    The parts are ordered by their lowest ids, so that the order is the same on every rank:
    DeepSpeed passes sets, and each part may begin a collective.
    """
    parts: dict[int, list[Parameter]] = {}
    for param in sorted(params, key=lambda param: param.ds_id):
        parts.setdefault(id(param.nvme_swapper), []).append(param)
    return [(swapper_of(part[0]), part) for part in parts.values()]


def wrap_convert(original: Callable[..., None]) -> Callable[..., None]:
    """Replace Init._convert_to_deepspeed_param: the coordinator gathers our parameters in turns."""

    @functools.wraps(original)
    def convert(init: Any, param: Parameter) -> None:
        original(init, param)
        swapper = swapper_of(param)
        if swapper is None:
            _refuse_for_stock(param)
        else:
            param.all_gather_coalesced = _coalesced_in_turns(param.all_gather_coalesced, swapper)

    return convert


def _refuse_for_stock(param: Parameter) -> None:
    """Refuse a parameter whose values DeepSpeed's own swapper would change silently.

    All of its buffers have the model's dtype, and it casts the values that it copies into them.
    """
    stock = param.nvme_swapper
    if not hasattr(stock, "memascend_attachment") or param.dtype == stock.dtype:
        return
    world = dist.get_world_size(group=param.ds_process_group)
    if stock.swappable_tensor(numel=-(-param.ds_numel // world)):
        raise ConfigError(
            "memascend.buffer_pool is off, and DeepSpeed's own swapper keeps every parameter on "
            f"the drive in {stock.dtype}: one of {param.ds_numel} elements is {param.dtype}, and "
            "its values would change. Turn buffer_pool on"
        )


def wrap_partition(original: Callable[..., None]) -> Callable[..., None]:
    """Replace Init._partition_param: a modified parameter is partitioned into a slot.

    Counts the device memory that it releases. At the first partitioning a parameter too small for
    the drive gets a pinned tensor; it is in our arena. DeepSpeed passes a list of parameters to the
    zero.Init context of the first one; here each is partitioned in its own context.
    """

    @functools.wraps(original)
    def partition(
        init: Any,
        param: Parameter,
        buffer: Any = None,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        swapper = swapper_of(param)
        partition_here = functools.partial(
            original, init, param, buffer, has_been_updated=has_been_updated, free_data=free_data
        )
        is_ours = isinstance(init.param_swapper, ParameterSwapper) or swapper is not None
        if is_ours and param.nvme_swapper is not init.param_swapper:
            param.partition(has_been_updated=has_been_updated, free_data=free_data)
        elif swapper is None:
            partition_here()
        elif param.ds_tensor is None:
            with swapper.memascend_attachment.host_buffers("small parameters"):
                partition_here()
        else:
            on_drive = param.ds_tensor.final_location == "nvme"
            is_gathered = param.ds_status is ZeroParamStatus.AVAILABLE
            if has_been_updated and on_drive and is_gathered:
                swapper.stage_for_update(param)
            whole_bytes = param.data.nbytes
            partition_here()
            if param.data.nbytes < whole_bytes:
                swapper.note_released(whole_bytes)

    return partition


class _GatherHandle:
    """A handle of gathers in flight; if waiting for one fails, all parameters are absent again.

    `shards` keeps the device memory of the shards until the wait. A collective runs on its own
    stream and refers only to `param.ds_tensor`, whose data is replaced when the swapper releases
    the shard: the allocator could then reuse the memory too early, in the order of another stream.
    """

    def __init__(
        self,
        swapper: ParameterSwapper,
        params: Sequence[Parameter],
        handles: Sequence[Any],
        shards: Sequence[Any],
    ) -> None:
        self.handles = handles
        self.stream = stream_here()
        self._swapper = swapper
        self._params = params
        self._shards = shards
        self._is_over = False

    def wait(self, **keywords: Any) -> None:
        """Wait for the gathers. DeepSpeed calls this once for each parameter.

        Only the first call does: before 0.19.7 a handle of DeepSpeed's that is waited for again
        makes its parameter available again, also one that was released meanwhile.
        """
        if self._is_over:
            return
        try:
            for handle in self.handles:
                handle.wait(**keywords)
        except BaseException:
            self.give_up()
            raise
        self._is_over = True
        self._shards = ()

    def give_up(self) -> None:
        """Make all parameters absent again."""
        self._is_over = True
        self._swapper.give_up(self._params)


def wrap_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Init._all_gather, which scripts call: gather each swapper's parameters in turns.

    Parameters that are already gathered are left out, since they have no host copy. With one rank
    the gather is a copy, for a single parameter too: upstream would use a collective for it, whose
    library may not support its dtype (gloo supports neither float8 nor int16).
    """

    @functools.wraps(original)
    def all_gather(
        init: Any,
        param_list: Sequence[Parameter],
        async_op: bool = False,
        hierarchy: int | None = None,
    ) -> Any:
        handles: list[Any] = []

        def gather(part: Sequence[Parameter], *, is_alone: bool = False) -> None:
            if not is_alone:
                # On gloo the gathers of a list are independent, and before 0.19.8 DeepSpeed waits
                # for the last one alone.
                one_by_one = not async_op and stream_here() is None
                for some in [[one] for one in part] if one_by_one else [part]:
                    gathers = original(init, some, async_op=async_op, hierarchy=hierarchy)
                    handles.extend(gathers or [])
                return
            handles.append(_no_gather_coalesced(part))
            if not async_op:
                handles[-1].wait()

        with _whole_or_not_at_all(param_list, handles):
            for swapper, part in by_swapper(param_list):
                if swapper is None:
                    gather(part)
                    continue
                swapper.gathers_on_demand.finish(part)
                absent = _without_duplicates(filter(_is_absent, part))
                for turn in swapper.turns(absent):
                    swapper.wait_for_updates(turn)
                    swapper.wait_for_released()
                    swapper.swap_in(turn, async_op=False)
                    if not async_op:  # else nothing keeps the copies until the gather is over
                        swapper.start_copies(turn)
                    gather(turn, is_alone=swapper.is_alone)
                    swapper.after_gather(turn)
        return handles if async_op else None

    return all_gather


def _coalesced_in_turns(
    gather: Callable[..., Any], swapper: ParameterSwapper
) -> Callable[..., Any]:
    """Wrap the coordinator's gather: gather in turns, return one handle for all of them."""

    def start(listed: Sequence[Parameter], **keywords: Any) -> Any:
        handles: list[Any] = []
        shards: list[Any] = []
        with _whole_or_not_at_all(listed, handles):
            for turn in swapper.turns(listed):
                swapper.wait_for_updates(turn)
                swapper.wait_for_released()
                swapper.swap_in(turn, async_op=False)
                swapper.start_copies(turn)
                shards.extend(p.ds_tensor.data for p in turn if p.ds_tensor.device.type != "cpu")
                handles.append(gather(turn, **keywords))
                swapper.after_gather(turn)
        return _GatherHandle(swapper, listed, handles, shards)

    def all_gather_coalesced(params: Iterable[Parameter], **keywords: Any) -> Any:
        listed, gathers = list(params), swapper.gathers_on_demand
        if any(keywords.values()):
            return start(listed, **keywords)
        gathers.start()
        on_demand = {p.ds_id: p for p in gathers.on_demand(p for p in listed if _is_absent(p))}
        if not on_demand:
            return start(listed, **keywords)
        now = [param for param in listed if param.ds_id not in on_demand]
        try:
            with _whole_or_not_at_all(listed, []):
                deferred = gathers.defer(on_demand.values(), start)
                return GatherHandles(gathers, start(now, **keywords) if now else None, deferred)
        except BaseException:
            gathers.withdraw(on_demand.values())
            raise

    return all_gather_coalesced


def wrap_coordinated(original: Callable[..., None]) -> Callable[..., None]:
    """Replace PartitionedParameterCoordinator.__all_gather_params: call it for each swapper."""

    @functools.wraps(original)
    def gather(coordinator: Any, params: Iterable[Parameter], forward: bool) -> None:
        for _, part in by_swapper(params):
            original(coordinator, part, forward)

    return gather


def wrap_fetch(original: Callable[..., None]) -> Callable[..., None]:
    """Replace PartitionedParameterCoordinator._fetch_sub_module_impl.

    Before 0.18.6 fetch_sub_module, which is not told whether the module is a leaf.

    Passes the parameters of the fetched module to the gathers on demand, and drops DeepSpeed's
    trace if it lacks a parameter of the module.
    """

    @functools.wraps(original)
    def fetch(coordinator: Any, module: Any, forward: bool, *is_leaf: bool) -> None:
        recurse = is_leaf[0] if is_leaf else z3_leaf_module(module)
        params = list(iter_params(module, recurse=recurse))
        parts = [(swapper, part) for swapper, part in by_swapper(params) if swapper is not None]
        if parts:
            drop_stale_trace(coordinator, params)
        needed = [
            (swapper.gathers_on_demand, frozenset(param.ds_id for param in part))
            for swapper, part in parts
        ]
        try:
            for gathers, _ in needed:
                gathers.fetching.needed = needed
            original(coordinator, module, forward, *is_leaf)
        finally:
            for gathers, _ in needed:
                gathers.fetching.needed = None

    return fetch


def wrap_register(original: Callable[..., None]) -> Callable[..., None]:
    """Replace InflightParamRegistry.__setitem__: give each parameter of a list its own handle.

    Passes the registry to the gathers on demand, so that a use before the parameter's module can
    wait.
    """

    @functools.wraps(original)
    def register(registry: Any, param: Parameter, handle: Any) -> None:
        own = handle.of(param) if isinstance(handle, GatherHandles) else handle
        original(registry, param, own)
        swapper = swapper_of(param)
        if swapper is not None:
            swapper.gathers_on_demand.note_registry(param, registry)

    return register


@contextmanager
def _whole_or_not_at_all(params: Iterable[Parameter], handles: Sequence[Any]) -> Iterator[None]:
    """Undo a gather that fails, for instance because the device is out of memory.

    Otherwise its parameters would stay in flight for DeepSpeed and slots would stay taken. Only
    parameters that were absent before belong to this gather.
    """
    own = [param for param in params if _is_absent(param)]
    try:
        yield
    except BaseException:
        try:
            for handle in handles:
                with suppress(Exception):  # the first error is raised below
                    handle.wait()
        finally:  # Ctrl-C may end a wait
            for swapper, part in by_swapper(own):
                if swapper is not None:
                    swapper.give_up(part)
        raise


def _is_absent(param: Parameter) -> bool:
    return bool(param.ds_status is ZeroParamStatus.NOT_AVAILABLE)


def _without_duplicates(params: Iterable[Parameter]) -> list[Parameter]:
    return list({p.ds_id: p for p in params}.values())
