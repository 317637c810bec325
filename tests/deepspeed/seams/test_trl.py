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


#: Modules with the names of their functions.
FUNCTIONS = list(trl_seams.FUNCTIONS.items())


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    module = ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_arming_wraps_the_function_and_disarming_restores_it(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * 2

    loaded(monkeypatch, module, **{name: Function})
    for _ in range(2):
        trl_seams.arm()
    assert "apply" in vars(Function)
    assert Function.apply(torch.ones(1)).item() == 2
    seams.disarm()
    assert "apply" not in vars(Function)


@pytest.mark.parametrize("names", [{}, {FUNCTIONS[0][1]: "something else"}])
def test_a_trl_without_it_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]
) -> None:
    module, _ = FUNCTIONS[0]
    loaded(monkeypatch, module, **names)
    trl_seams.arm()
    assert {name: getattr(sys.modules[module], name) for name in names} == names


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_the_trl_that_is_installed_has_it(module: str, name: str) -> None:
    function = getattr(pytest.importorskip(module), name)
    assert issubclass(function, torch.autograd.Function)
