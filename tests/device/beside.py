"""A script that gathers by hand on a stream of its own, while DeepSpeed gathers ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.device.emulator import torch_device


def gather_beside(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have every module's hook do so; return what tells how often.

    Each gather ahead is noted, as where no read is over yet: it would depend on the drive.
    """
    from memascend.deepspeed.parameters.gather import swapper_of
    from memascend.deepspeed.parameters.swapper import ParameterSwapper
    from tests.parity import training

    original, count = training.build_model, 0

    def build_model(*arguments: Any, **keywords: Any) -> Any:
        model, side = original(*arguments, **keywords), torch_device.Stream()

        def gather(module: Any, _: object) -> None:
            nonlocal count
            swapper = next(filter(None, map(swapper_of, module.parameters())), None)
            noted = [] if swapper is None else [*swapper.gathers_on_demand._deferred.values()]
            if not noted:
                return
            param = noted[-1].param
            with torch_device.stream(side):
                param.all_gather(param_list=[param])
                param.data.sum()
                param.data.record_stream(side)
            count += 1

        for module in model.modules():
            module.register_forward_pre_hook(gather)
        return model

    patch.setattr(training, "build_model", build_model)
    patch.setattr(ParameterSwapper, "would_wait", lambda self, params: list(params))
    return lambda: count
