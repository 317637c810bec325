"""Activation: a post-import hook, so that a training script need not change.

`torch` calls install() through the `torch.backends` entry point while `import torch` is still
running, and `import memascend` calls it too. Standard library only; it must never break
`import torch`, and it does nothing until DeepSpeed's config module is imported.
"""

from __future__ import annotations

import types
import warnings

TARGET_MODULE = "deepspeed.runtime.config"


def install() -> None:
    """Install the hook that detects DeepSpeed configs with a `memascend` block. Idempotent."""
    from memascend.base.post_import import after_import

    after_import(TARGET_MODULE, _observe)


def _observe(module: types.ModuleType) -> None:
    try:
        from memascend.deepspeed.seams.arm import observe

        observe(module)
    except Exception as error:
        # Stock DeepSpeed must stay importable; the warning shows that a block has no effect.
        warnings.warn(f"memascend could not hook into DeepSpeed: {error!r}", stacklevel=2)
