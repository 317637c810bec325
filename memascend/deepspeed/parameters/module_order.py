"""The order of parameters that DeepSpeed has traced, where a module's own list has grown since.

A module that touches a weight of another one outside its forward pass gets it registered as an
external parameter, at the first touch that finds it absent. The trace of the modules does not have
it there, and DeepSpeed's coordinator raises "tracing error" in the next pass. Whether the first
touch finds a weight absent follows from how far ahead was gathered, which CPU offload and a drive
do differently: a training that CPU offload serves must not end here. Knows DeepSpeed's coordinator
alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

Parameter = Any


def forget_stale_order(coordinator: Any, params: Iterable[Parameter]) -> None:
    """Have DeepSpeed trace anew where it would raise "tracing error" for a module.

    As it does itself where another module comes than the trace has: without a trace it gathers
    what each module needs, and records the next pass.

    Args:
        coordinator: A PartitionedParameterCoordinator, about to fetch a module.
        params: All parameters that the module needs.
    """
    if coordinator.is_complete_trace() and not _has_next(coordinator, set(params)):
        coordinator._invalidate_trace()
        # It has answers of the old order, by which a weight would stay gathered until the step.
        released_params_cache().cache_clear()


def released_params_cache() -> Any:
    """Return the cache of all coordinators' answers to the question what a module lets go."""
    function = vars(PartitionedParameterCoordinator)[
        "_PartitionedParameterCoordinator__params_to_release"
    ]
    while not hasattr(function, "cache_clear"):  # behind DeepSpeed's decorator for profilers
        (function,) = (cell.cell_contents for cell in function.__closure__)
    return function


def _has_next(coordinator: Any, params: set[Parameter]) -> bool:
    """Return whether the trace goes on with what of a module is not fetched ahead yet."""
    step = _private(coordinator, "step_id")
    fetched_for = _private(coordinator, "most_recent_step_id_param_fetched_for")
    due = {param for param in params if fetched_for[param] < step}
    traced: set[Parameter] = set()
    for one in _private(coordinator, "param_queue"):
        if len(traced) == len(due):
            break
        traced.add(one.param)
    return traced == due


def _private(coordinator: Any, name: str) -> Any:
    return getattr(coordinator, f"_PartitionedParameterCoordinator__{name}")
