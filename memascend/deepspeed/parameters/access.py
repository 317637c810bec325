"""A weight that a module uses outside of the weight's own module, as `self.head.weight`.

DeepSpeed gathers one that is absent, and from then on for the module that uses it. One that it has
gathered ahead it gives as it is: while the gather is not over it may have no element, and its sum
is 0; in the backward pass, where it has left again, there is an error. How far a gather is depends
on the drive. So one that is gathered ahead is treated as an absent one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.partition_parameters import register_external_parameter

from memascend.deepspeed.parameters.gather import swapper_of


def wrap_access(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ZeROOrderedDict.__getitem__: what is gathered ahead is here when it is used."""

    @functools.wraps(original)
    def get(parameters: Any, key: str) -> Any:
        param = original(parameters, key)
        # First, as upstream does: no status may become a condition of a compiled graph.
        if torch.compiler.is_compiling() or not parameters._in_forward:
            return param
        if FWD_MODULE_STACK and FWD_MODULE_STACK[-1] is parameters._parent_module:
            return param  # the module's own, which DeepSpeed has fetched
        swapper = swapper_of(param)
        if swapper is not None and swapper.late_gathers.is_ahead(param):
            register_external_parameter(FWD_MODULE_STACK[-1], param)
            param.all_gather()
        return param

    return get
