"""The only file that assigns to TRL: one method of two classes, if TRL is imported and has them.

TRL's chunked losses gather the head's weight again in backward, using the parameter that they saved
in forward. Hooks of saved tensors return another tensor, never that parameter. Only names are used;
a TRL without them is left unchanged.
"""

from __future__ import annotations

import sys
from typing import Any

from memascend.deepspeed.seams.table import import_name

#: Names of autograd functions that gather a saved parameter in backward, by their modules.
FUNCTIONS = {
    "trl.kernels.chunked_logprob": "ChunkedLogProbFunction",
    "trl.kernels.chunked_divergence": "ChunkedDivergenceFunction",
}

#: The classes that were given an `apply` of their own, instead of the inherited one.
_changed: list[type[Any]] = []


def arm() -> None:
    """Wrap the functions whose modules are imported. Idempotent."""
    for module, name in FUNCTIONS.items():
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, type) and function not in _changed:
            wrap_apply = import_name("memascend.deepspeed.activations.saved_parameters:wrap_apply")
            _changed.append(function)
            function.apply = staticmethod(wrap_apply(function.apply))  # type: ignore[attr-defined]


def disarm() -> None:
    """Restore the originals."""
    while _changed:
        del _changed.pop().apply
