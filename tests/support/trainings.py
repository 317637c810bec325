"""A model, its accounts and DeepSpeed's defaults: what the arithmetic of a context starts from."""

from __future__ import annotations

import dataclasses
from typing import Any

from memascend.config.block import ActivationConfig
from memascend.plan.context import DeviceSettings, Training
from memascend.plan.derive import PlanRequest, derive
from memascend.plan.shapes import builtin
from memascend.plan.stock import stock


def training(model: str = "Llama-3.1-8B", **changes: Any) -> Training:
    """Return a training of one rank in bf16, with the values of Hugging Face's example."""
    shapes, request = builtin(model), changes.pop("request", PlanRequest())
    ours = dataclasses.replace(request, has_activations=True)
    parts: dict[str, Any] = {
        "device": DeviceSettings(),
        "activations": ActivationConfig(enabled=True),
        "stock": stock(shapes, request=request),
        "ours": derive(shapes, request=ours),
    }
    return Training(shapes=shapes, **(parts | changes))
