"""After `engine.destroy()` DeepSpeed keeps the model alive no longer.

With CPU offload parameters stay readable then, and a model may be given to another engine: so it is
here. Drive space, descriptors, threads and memory of parameters go with the model, when the script
drops it. DeepSpeed has two references to every module that it has served, in a list and in a cache
of the process; both are removed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero import parameter_offload

from memascend.deepspeed.parameters.gather import swapper_of
from memascend.deepspeed.parameters.module_order import released_params_cache


def wrap_destroy(original: Callable[..., None]) -> Callable[..., None]:
    """Stand around `DeepSpeedZeRoOffload.destroy`, of engines that train and others.

    The rank is through with this model until another engine has it: its status says so.
    """

    @functools.wraps(original)
    def destroy(self: Any) -> None:
        original(self)
        swappers = set(filter(None, map(swapper_of, self.module.parameters())))
        for swapper in swappers:
            # An engine that does not train has no optimizer of ours, which would say it.
            swapper.memascend_attachment.leave()
        if swappers:
            _forget_module(self.module)

    return destroy


def _forget_module(module: Any) -> None:
    stack = parameter_offload.FWD_MODULE_STACK
    # In place, and by identity: it is the same list for all engines.
    stack[:] = [one for one in stack if one is not module]
    released_params_cache().cache_clear()  # other engines fill it anew
