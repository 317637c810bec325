"""DeepSpeed's traces of modules: which are stale, and decisions that hold for one trace only.

If a module uses a weight of another module outside that one's forward pass, DeepSpeed registers it
as an external parameter at the first use that finds it absent. The trace does not have it there,
and DeepSpeed's coordinator raises "tracing error" in the next pass. A use finds the weight absent
or not depending on the prefetch, which differs between CPU offload and a drive. A training that
works with CPU offload must work here too. Knows only DeepSpeed's coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

Parameter = Any
#: ds_ids of the parameters that are released, by the ds_id of their module and its step.
Decisions = dict[tuple[int, int], frozenset[int]]


def drop_stale_trace(coordinator: Any, params: Iterable[Parameter]) -> None:
    """Invalidate the trace if DeepSpeed would raise "tracing error" for a module.

    DeepSpeed does the same if the order of modules differs from the trace. Without a trace it
    gathers the parameters of each module when it fetches the module, and records the next pass.

    Args:
        coordinator: A PartitionedParameterCoordinator, about to fetch a module.
        params: All parameters that the module needs.
    """
    if coordinator.is_complete_trace() and not _has_next(coordinator, set(params)):
        coordinator._invalidate_trace()


class ReleaseDecisions:
    """Decisions about which parameters a module releases, for the current trace of each engine.

    They belong to the model, as the swapper does: a trace keeps its modules alive.
    """

    def __init__(self) -> None:
        self._by_coordinator: WeakKeyDictionary[Any, tuple[Any, Decisions]] = WeakKeyDictionary()

    def of(self, coordinator: Any, order: Any) -> Decisions:
        """Return the decisions for a trace; the caller adds to them.

        Args:
            coordinator: DeepSpeed's, which has one trace at a time.
            order: The modules of the trace, another object for each trace.
        """
        traced, decided = self._by_coordinator.get(coordinator, (None, {}))
        if traced is not order:
            decided = {}
            self._by_coordinator[coordinator] = order, decided
        return decided


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
