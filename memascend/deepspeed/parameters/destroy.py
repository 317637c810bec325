"""Removes DeepSpeed's references to a model at `engine.destroy()`.

As with CPU offload, parameters stay readable after it, and another engine may use the model. Drive
space, descriptors, threads and memory of parameters are freed with the model, when the script drops
it. DeepSpeed has two process-wide references to every module that it has run, in a list and in a
cache. The first is removed here; `releases` keeps the second from being made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.zero import parameter_offload

from memascend.deepspeed.parameters.gather import swapper_of


def wrap_destroy(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DeepSpeedZeRoOffload.destroy`, which training and inference engines call.

    Marks the rank's status as finished with this model.
    """

    @functools.wraps(original)
    def destroy(self: Any) -> None:
        original(self)
        swappers = set(filter(None, map(swapper_of, self.module.parameters())))
        for swapper in swappers:
            # An inference engine has no optimizer of ours, which would do this.
            swapper.memascend_attachment.leave()
        if swappers:
            _drop_module(self.module)

    return destroy


def _drop_module(module: Any) -> None:
    stack = parameter_offload.FWD_MODULE_STACK
    # In place: all engines share the list.
    stack[:] = [one for one in stack if one is not module]
