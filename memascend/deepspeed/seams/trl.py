"""The only file that assigns to TRL: one method, if TRL is imported and has it.

TRL's chunked loss gathers the head's weight again in backward, using the parameter that it saved in
forward. Hooks of saved tensors return another tensor, never that parameter. Only names are used; a
TRL without them is left unchanged.
"""

from __future__ import annotations

import sys
from typing import Any

from memascend.deepspeed.seams.table import import_name

MODULE, FUNCTION = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"

#: The class that was given an `apply` of its own, instead of the inherited one.
_changed: list[type[Any]] = []


def arm() -> None:
    """Wrap the function if TRL is imported and has it. Idempotent."""
    function = getattr(sys.modules.get(MODULE), FUNCTION, None)
    if isinstance(function, type) and not _changed:
        wrap_apply = import_name("memascend.deepspeed.activations.saved_parameters:wrap_apply")
        _changed.append(function)
        function.apply = staticmethod(wrap_apply(function.apply))  # type: ignore[attr-defined]


def disarm() -> None:
    """Restore the original."""
    while _changed:
        del _changed.pop().apply
