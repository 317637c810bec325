"""Muon with one iteration for an update, or none: more would take most of a run, in DeepSpeed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def orthogonalized_roughly() -> Iterator[None]:
    """Iterate once for an update."""
    from deepspeed.runtime.zero.muon import original_muon

    with pytest.MonkeyPatch.context() as patch:
        for name in ("zeropower_via_gram_newtonschulz", "zeropower_via_newtonschulz5"):
            if original := getattr(original_muon, name, None):
                once = functools.partial(_iterated_once, original)
                patch.setattr(original_muon, name, once)
        yield


def _iterated_once(orthogonalize: Callable[..., Any], matrix: Any, steps: int) -> Any:
    return orthogonalize(matrix, 1)


def leave_updates_as_they_are() -> None:
    """Spare all iterations, and the compilation of kernels, where values do not matter."""
    from deepspeed.runtime.zero.muon import original_muon

    torch.compiler.set_stance("force_eager")
    original_muon.zeropower_via_gram_newtonschulz = lambda matrix, steps: matrix
