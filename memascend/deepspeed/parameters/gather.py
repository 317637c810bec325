"""Wraps the gather and partition calls of zero.Init around our parameter swapper.

Two things happen here: slots of gathered parameters go back early, and a list larger than the pool
is gathered in turns, each of which is read as a whole first. Parameters of other swappers pass
through to the stock functions untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus

from memascend.deepspeed.parameters.swapper import ParameterSwapper

Parameter = Any


def swapper_of(param: Parameter) -> ParameterSwapper | None:
    """Return our swapper of a ZeRO parameter, or None when it has a stock one or none."""
    swapper = getattr(param, "nvme_swapper", None)
    return swapper if isinstance(swapper, ParameterSwapper) else None


def wrap_convert(original: Callable[..., None]) -> Callable[..., None]:
    """Replace Init._convert_to_deepspeed_param: give the parameter our gather functions."""

    @functools.wraps(original)
    def convert(init: Any, param: Parameter) -> None:
        original(init, param)
        swapper = swapper_of(param)
        if swapper is not None:
            param.all_gather = _in_turns(param, param.all_gather, swapper)
            param.all_gather_coalesced = _coalesced_in_turns(param.all_gather_coalesced, swapper)

    return convert


def wrap_partition(original: Callable[..., None]) -> Callable[..., None]:
    """Replace Init._partition_param: a modified parameter gets a slot to be partitioned into.

    The first partitioning of a parameter too small for the drive makes a pinned tensor; it comes
    from our arena.
    """

    @functools.wraps(original)
    def partition(init: Any, param: Parameter, *arguments: Any, **keywords: Any) -> None:
        swapper = swapper_of(param)
        if swapper is None:
            original(init, param, *arguments, **keywords)
        elif param.ds_tensor is None:
            with swapper.memascend_attachment.host_buffers("small parameters"):
                original(init, param, *arguments, **keywords)
        else:
            updated = keywords.get(
                "has_been_updated", arguments[1] if len(arguments) > 1 else False
            )
            on_drive = param.ds_tensor.final_location == "nvme"
            if updated and on_drive and param.ds_status is ZeroParamStatus.AVAILABLE:
                swapper.stage_for_update(param)
            original(init, param, *arguments, **keywords)

    return partition


def _in_turns(
    param: Parameter, gather: Callable[..., Any], swapper: ParameterSwapper
) -> Callable[..., Any]:
    """Wrap the blocking gather; skip what is gathered already, which has no host copy."""

    def all_gather(
        param_list: Sequence[Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> Any:
        listed = [param] if param_list is None else list(param_list)
        absent = [p for p in listed if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
        handles: list[Any] = []
        for turn in swapper.turns(_without_duplicates(absent)):
            swapper.swap_in(turn, async_op=False)
            handles.extend(gather(param_list=turn, async_op=async_op, hierarchy=hierarchy) or [])
            swapper.after_gather(turn)
        return handles if async_op else None

    return all_gather


def _coalesced_in_turns(
    gather: Callable[..., Any], swapper: ParameterSwapper
) -> Callable[..., Any]:
    """Wrap the coordinator's gather: one handle, whatever the number of turns."""

    def all_gather_coalesced(params: Iterable[Parameter], **keywords: Any) -> Any:
        handles = []
        for turn in swapper.turns(list(params)):
            swapper.swap_in(turn, async_op=False)
            handles.append(gather(turn, **keywords))
            swapper.after_gather(turn)
        if not handles:
            return gather([], **keywords)
        return handles[0] if len(handles) == 1 else MultipleAllGatherHandles(handles)

    return all_gather_coalesced


def _without_duplicates(params: Iterable[Parameter]) -> list[Parameter]:
    return list({p.ds_id: p for p in params}.values())
