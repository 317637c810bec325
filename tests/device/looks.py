"""Gradients read in hooks on the thread that called backward, while the device delivers others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad

#: Long enough for a gradient to be delivered; where it takes longer nothing fails.
MOMENT_S = 0.1


def look_in_hooks(patch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """Have a hook read the gradients of the modules before, in the order of backward.

    Each output is multiplied by 1, which is a tensor on the host: its gradient comes to the thread
    that called backward. While that thread has slots it waits for a gradient to be delivered.

    Returns what tells how many gradients were read, and how often one arrived meanwhile.
    """
    from memascend.deepspeed.optimizer.gradients import StreamedGradients
    from memascend.transfer.staging import StagingSlots
    from tests.parity import training

    counts = {"looks": 0, "arrivals": 0}
    main, arrived = threading.main_thread(), threading.Event()
    is_looking = False
    earlier: list[Any] = []  # parameters whose gradients are on their way, or there

    def look(params: list[Any]) -> None:
        nonlocal is_looking
        coming, is_looking = earlier[:1], True
        earlier[:] = params
        try:
            for param in coming:
                counts["looks"] += 1
                safe_get_full_grad(param)
        finally:
            is_looking = False

    def add_one(module: Any, _: object, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return output
        one = torch.ones((), dtype=output.dtype, requires_grad=True)
        params = [param for param in module.parameters() if param.requires_grad]
        one.register_hook(lambda gradient: look(params))
        return output * one.to(output.device)

    build = training.build_model

    def build_model(*arguments: Any, **keywords: Any) -> Any:
        _, config = arguments
        # A gradient is delivered when the next one comes, not with all others at the end.
        config["zero_optimization"]["reduce_bucket_size"] = 1
        model = build(*arguments, **keywords)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(add_one)
        return model

    store, copy = StreamedGradients.put, StagingSlots._copy_out

    def store_noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if is_looking and threading.current_thread() is not main:
            counts["arrivals"] += 1
            arrived.set()
        return store(self, *arguments, **keywords)

    def copy_out(self: Any, *arguments: Any) -> None:
        if is_looking and threading.current_thread() is main:
            arrived.clear()
            arrived.wait(MOMENT_S)
        copy(self, *arguments)

    patch.setattr(training, "build_model", build_model)
    patch.setattr(StreamedGradients, "put", store_noted)
    patch.setattr(StagingSlots, "_copy_out", copy_out)
    return lambda: counts
