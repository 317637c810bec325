"""The only file that assigns to accelerate: the function that replaces a script's optimizer.

accelerate calls it before DeepSpeed sees a configuration, so it is wrapped with or without a block.
The wrapper returns what accelerate made, with a note of what it replaced, which only a model with a
block reads. Only names are used; an accelerate without them is left unchanged.
"""

from __future__ import annotations

from types import ModuleType

from memascend.base.post_import import after_import, forget_import
from memascend.deepspeed.seams.table import import_name

#: The module in which accelerate looks the function up, and its name.
MODULE, FUNCTION = "accelerate.accelerator", "map_pytorch_optim_to_deepspeed"
_WRAPPER = "memascend.deepspeed.optimizer.replaced:wrap_map"


def watch() -> None:
    """Wrap the function, at once or when accelerate is imported. Idempotent."""
    after_import(MODULE, _wrap)


def forget() -> None:
    """Do not wrap the function when accelerate is imported."""
    forget_import(MODULE)


def _wrap(module: ModuleType) -> None:
    original = getattr(module, FUNCTION, None)
    if callable(original) and not hasattr(original, "__memascend__"):
        vars(module)[FUNCTION] = import_name(_WRAPPER)(original)
