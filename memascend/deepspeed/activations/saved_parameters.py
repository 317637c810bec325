"""Autograd functions whose saved tensors must come back as the same objects: parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from memascend.deepspeed.activations.forward import current
from memascend.streaming.activations.hooks import without_hooks


def wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `apply` of such a function: the tensors that it saves stay in memory."""

    @functools.wraps(original)
    def apply(*arguments: Any, **keywords: Any) -> Any:
        if current.get() is None:
            return original(*arguments, **keywords)
        with without_hooks():
            return original(*arguments, **keywords)

    return apply
