"""memascend: SSD-offloaded fine-tuning with DeepSpeed in a fraction of the host memory.

Importing it only installs the post-import hook, which `torch` also installs through the
`torch.backends` entry point: `import memascend` is the explicit way to the same activation. The
public names are those of `__all__`; names that need more than the standard library are imported at
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from memascend.autoload import install
from memascend.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    EngineUnavailableError,
    GradientGoneError,
    HostMemoryError,
    IncompleteGradientError,
    LoneRankError,
    MemAscendError,
    StoreError,
    StoreFullError,
    TornStepError,
    UnsupportedDeepSpeedError,
    WriteBudgetError,
)
from memascend.version import __version__

if TYPE_CHECKING:
    from memascend.config.block import MemAscendConfig, parse_block
    from memascend.plan.derive import Plan, derive
    from memascend.plan.request import PlanRequest
    from memascend.plan.shapes import ModelShapes, TensorShape

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CorruptionError",
    "EngineUnavailableError",
    "GradientGoneError",
    "HostMemoryError",
    "IncompleteGradientError",
    "LoneRankError",
    "MemAscendConfig",
    "MemAscendError",
    "ModelShapes",
    "Plan",
    "PlanRequest",
    "StoreError",
    "StoreFullError",
    "TensorShape",
    "TornStepError",
    "UnsupportedDeepSpeedError",
    "WriteBudgetError",
    "__version__",
    "derive",
    "install",
    "parse_block",
]

_HOMES = {
    "MemAscendConfig": "memascend.config.block",
    "ModelShapes": "memascend.plan.shapes",
    "Plan": "memascend.plan.derive",
    "PlanRequest": "memascend.plan.request",
    "TensorShape": "memascend.plan.shapes",
    "derive": "memascend.plan.derive",
    "parse_block": "memascend.config.block",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
