"""Drops DeepSpeed's trace of parameters if a module has gained an external parameter since.

If a module uses a weight of another module outside that one's forward pass, DeepSpeed registers it
as an external parameter at the first use that finds it absent. The trace does not have it there,
and DeepSpeed's coordinator raises "tracing error" in the next pass. A use finds the weight absent
or not depending on the prefetch, which differs between CPU offload and a drive. A training that
works with CPU offload must work here too. Knows only DeepSpeed's coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Parameter = Any


def forget_stale_order(coordinator: Any, params: Iterable[Parameter]) -> None:
    """Invalidate the trace if DeepSpeed would raise "tracing error" for a module.

    DeepSpeed does the same if the order of modules differs from the trace. Without a trace it
    gathers the parameters of each module when it fetches the module, and records the next pass.

    Args:
        coordinator: A PartitionedParameterCoordinator, about to fetch a module.
        params: All parameters that the module needs.
    """
    if coordinator.is_complete_trace() and not _has_next(coordinator, set(params)):
        coordinator._invalidate_trace()


def _has_next(coordinator: Any, params: set[Parameter]) -> bool:
    """Return whether the trace continues with the module's parameters that are not fetched yet."""
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
