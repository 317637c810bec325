"""Arming TRL: only where it is imported and has the function, and undone completely."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("deepspeed")
import torch

from memascend.deepspeed.seams import arm as seams
from memascend.deepspeed.seams import trl as trl_seams

pytestmark = pytest.mark.deepspeed


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    trl_seams.disarm()
    yield
    trl_seams.disarm()


def loaded(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    module = ModuleType(trl_seams.MODULE)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, trl_seams.MODULE, module)


def test_arming_wraps_the_function_and_disarming_restores_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ChunkedLogProbFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * 2

    loaded(monkeypatch, ChunkedLogProbFunction=ChunkedLogProbFunction)
    for _ in range(2):
        trl_seams.arm()
    assert "apply" in vars(ChunkedLogProbFunction)
    assert ChunkedLogProbFunction.apply(torch.ones(1)).item() == 2
    seams.disarm()
    assert "apply" not in vars(ChunkedLogProbFunction)


@pytest.mark.parametrize("names", [{}, {"ChunkedLogProbFunction": "something else"}])
def test_a_trl_without_it_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]
) -> None:
    loaded(monkeypatch, **names)
    trl_seams.arm()
    assert {name: getattr(sys.modules[trl_seams.MODULE], name) for name in names} == names


def test_the_trl_that_is_installed_has_it() -> None:
    kernels: Any = pytest.importorskip(trl_seams.MODULE)
    function = getattr(kernels, trl_seams.FUNCTION)
    assert issubclass(function, torch.autograd.Function)
