"""The only file that assigns to TRL: one method, where TRL is in use and has it.

Its chunked loss gathers the head's weight again in backward, by the parameter that it saved in
forward. What comes back from hooks of saved tensors is never that parameter, but a tensor of its
own. Only names are used; a TRL without them is left as it is.
"""

from __future__ import annotations

import sys
from typing import Any

from memascend.deepspeed.seams.table import import_name

MODULE, FUNCTION = "trl.kernels.chunked_logprob", "ChunkedLogProbFunction"

#: The class that was given an `apply` before the one it inherits.
_changed: list[type[Any]] = []


def arm() -> None:
    """Wrap the function where TRL is imported and has it. Idempotent."""
    function = getattr(sys.modules.get(MODULE), FUNCTION, None)
    if isinstance(function, type) and not _changed:
        wrap_apply = import_name("memascend.deepspeed.activations.saved_parameters:wrap_apply")
        _changed.append(function)
        function.apply = staticmethod(wrap_apply(function.apply))  # type: ignore[attr-defined]


def disarm() -> None:
    """Restore what stood there."""
    while _changed:
        del _changed.pop().apply
