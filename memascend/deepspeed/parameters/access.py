"""Access to a weight outside of its own module, such as `self.head.weight` in another module.

If the weight is absent DeepSpeed gathers it, and from then on fetches it for the module that uses
it. If it is being prefetched DeepSpeed returns it as it is. Until the gather ends it may have no
elements, so that its sum is 0, and in backward, where it is released again, its use is an error.
The progress of a gather depends on the drive. So a prefetched weight is treated as an absent one.
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
    """Replace ZeROOrderedDict.__getitem__: finish the gather of a prefetched weight before use."""

    @functools.wraps(original)
    def get(parameters: Any, key: str) -> Any:
        param = original(parameters, key)
        # First, as upstream: a compiled graph must not depend on a parameter's status.
        if torch.compiler.is_compiling() or not parameters._in_forward:
            return param
        if FWD_MODULE_STACK and FWD_MODULE_STACK[-1] is parameters._parent_module:
            return param  # the module's own weight: DeepSpeed has fetched it
        swapper = swapper_of(param)
        if swapper is not None and swapper.gathers_on_demand.is_prefetched(param):
            register_external_parameter(FWD_MODULE_STACK[-1], param)
            param.all_gather()
        return param

    return get
