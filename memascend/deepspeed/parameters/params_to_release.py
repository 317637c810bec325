"""Decides for one trace only which parameters of a module are released behind it.

DeepSpeed caches these decisions by module and step, in one cache for the process. They outlive the
trace that they hold for: after a new trace a module is released, or stays gathered, by an old one.
The cache also keeps every coordinator and module alive. Clearing it with a destroyed engine is no
remedy: Python collects an engine at another time on each rank, after which one rank decides anew
and another does not. One gathers a parameter that the other still has, and both wait for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from memascend.deepspeed.parameters.gather import swapper_of


def wrap_params_to_release(original: Callable[..., Any]) -> Callable[..., set[int]]:
    """Replace PartitionedParameterCoordinator.__params_to_release, for modules of ours.

    The replacement returns ds_ids. Its caller may change the set.
    """
    decide = _uncached(original)

    @functools.wraps(original)
    def params_to_release(coordinator: Any, module: Any, step: int) -> set[int]:
        params = list(iter_params(module, recurse=z3_leaf_module(module)))
        if not params:
            return set()
        swapper = next(filter(None, map(swapper_of, params)), None)
        if swapper is None:
            released: set[int] = original(coordinator, module, step)
            return released
        order = coordinator._PartitionedParameterCoordinator__submodule_order  # new in each trace
        decided = swapper.releases.of(coordinator, order)
        key = (module.ds_id, step)
        if key not in decided:
            decided[key] = frozenset(decide(coordinator, module, step))
        return set(decided[key])

    return params_to_release


def _uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return DeepSpeed's function without its cache, which is inside a decorator for profilers."""
    while not hasattr(function, "cache_clear"):
        (function,) = (cell.cell_contents for cell in function.__closure__ or ())
    inner: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
    return inner
