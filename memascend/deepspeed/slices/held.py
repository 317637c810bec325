"""Weights that stay gathered while a layer computes its slices.

DeepSpeed releases a module's weights behind the module. Meanwhile this notes the weights instead,
and they are released behind the last slice. Modules in later slices are hidden from DeepSpeed, so
that its trace is that of one checkpointed layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module
from torch import nn

from memascend.errors import ConfigError

#: Releases a parameter; DeepSpeed's own method.
Release = Callable[..., None]


class HeldParameters:
    """The parameters of the layer that computes now; at most one layer of a process at a time."""

    def __init__(self) -> None:
        """Hold none."""
        self._held: frozenset[int] | None = None  # ids of parameters; None: no layer computes
        self._others: set[str] = set()
        self._asked: list[tuple[Release, Any, tuple[Any, ...]]] = []
        self._kept: set[Any] = set()  # ds_ids of modules that ran in the first slice and stay
        self._number = 0

    @contextmanager
    def holding(self, params: list[Any]) -> Iterator[Callable[[int], None]]:
        """Within the context parameters stay gathered; the value notes the number of a slice."""
        outer = self._held, self._asked, self._kept, self._number, self._others
        depth = len(parameter_offload.FWD_MODULE_STACK)
        asked: list[tuple[Release, Any, tuple[Any, ...]]] = []
        try:
            self._asked, self._kept, self._number, self._others = asked, set(), 0, set()
            self._held = frozenset(map(id, params))
            yield functools.partial(self._begin_slice, depth)
        finally:
            self._held, self._asked, self._kept, self._number, self._others = outer
            _leave_modules(depth)
            for release, coordinator, arguments in asked:
                release(coordinator, *arguments)

    def _begin_slice(self, depth: int, number: int) -> None:
        _leave_modules(depth)
        self._number = number

    def keeps(self, release: Release, coordinator: Any, param: Any, *rest: Any) -> bool:
        """Return whether a parameter is held; it is released later then."""
        if self._held is None or id(param) not in self._held:
            return False
        self._asked.append((release, coordinator, (param, *rest)))
        return True

    def hides(self, module: nn.Module) -> bool:
        """Return whether DeepSpeed has fetched a module in the first slice, and keeps it.

        Raises:
            ConfigError: Several ranks would gather it in a later slice, perhaps not all of them.
        """
        if self._held is None:
            return False
        if self._number > 0 and module.ds_id in self._kept:
            return True
        params = list(parameter_offload.iter_params(module, recurse=z3_leaf_module(module)))
        others = [param for param in params if id(param) not in self._held]
        if any(param.requires_grad for param in others):
            self._others.add(type(module).__name__)
        if self._number == 0 and not others:
            self._kept.add(module.ds_id)
        if self._number > 0 and not others:
            _refuse_late_gather(module, params)
        return False

    def others(self) -> set[str]:
        """Return the classes of modules that ran with trained parameters that are not held."""
        return self._others


def _leave_modules(depth: int) -> None:
    """Remove the modules that an error in a slice has left on DeepSpeed's stack."""
    while len(parameter_offload.FWD_MODULE_STACK) > depth:
        parameter_offload.FWD_MODULE_STACK.pop()


def _refuse_late_gather(module: nn.Module, params: list[Any]) -> None:
    """Raise ConfigError if ranks were to gather a module that the first slice did not use.

    Other ranks may have met it in another slice. They would gather other weights at this moment.
    """
    if not any(
        param.ds_status is ZeroParamStatus.NOT_AVAILABLE
        and dist.get_world_size(group=param.ds_process_group) > 1
        for param in params
    ):
        return
    stack = [type(one).__name__ for one in (*parameter_offload.FWD_MODULE_STACK, module)]
    raise ConfigError(
        f"slices of the batch: {stack[-1]} (in {' > '.join(stack[:-1])}) is used in a later slice "
        "and not in the first one. Several ranks gather weights together, and another rank may use "
        "it in another slice. likely cause: experts in a list that is not a leaf module. fix: name "
        'the class of the block that has them in "zero_optimization": {"leaf_module": {"classes": '
        "[...]}}, or call deepspeed.utils.set_z3_leaf_modules(model, [...]) before "
        "deepspeed.initialize; or leave memascend.micro_batches out"
    )


#: DeepSpeed's hooks have no object of ours at hand.
held = HeldParameters()


def wrap_release(original: Release) -> Release:
    """Wrap PartitionedParameterCoordinator.__release_param."""

    @functools.wraps(original)
    def release(coordinator: Any, param: Any, *rest: Any) -> None:
        if not held.keeps(original, coordinator, param, *rest):
            original(coordinator, param, *rest)

    return release


def wrap_before(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook of DeepSpeedZeRoOffload that runs before a module, forward or backward."""
    is_forward = original.__name__.startswith("pre_sub_module_forward")

    @functools.wraps(original)
    def before(self: Any, module: nn.Module) -> None:
        if not held.hides(module):
            original(self, module)
        elif is_forward:
            parameter_offload.FWD_MODULE_STACK.append(module)  # another hook removes it

    return before


def wrap_after(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a hook of DeepSpeedZeRoOffload that runs behind a module, forward or backward."""

    @functools.wraps(original)
    def after(self: Any, module: nn.Module) -> None:
        if not held.hides(module):
            original(self, module)

    return after
