"""After the end of an engine DeepSpeed keeps no model of ours alive, and others as ever."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero import parameter_offload

from memascend.deepspeed.parameters.destroy import wrap_destroy
from memascend.deepspeed.parameters.swapper import ParameterSwapper


def module_of(swapper: object) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    for param in module.parameters():
        param.nvme_swapper = swapper  # type: ignore[attr-defined]
    return module


def test_a_module_of_ours_goes_with_its_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    others = module_of(None)
    stack: list[object] = [others]
    monkeypatch.setattr(parameter_offload, "FWD_MODULE_STACK", stack)
    swapper = ParameterSwapper.__new__(ParameterSwapper)
    left: list[None] = []
    leave = functools.partial(left.append, None)
    swapper.memascend_attachment = SimpleNamespace(leave=leave)  # type: ignore[assignment]
    module = module_of(swapper)
    stack.append(module)
    called: list[object] = []
    wrap_destroy(called.append)(SimpleNamespace(module=module))
    assert [one.module for one in called] == [module]  # type: ignore[attr-defined]
    assert stack == [others]
    assert len(left) == 1
    gone = weakref.ref(module)
    del module
    called.clear()
    gc.collect()
    assert gone() is None


def test_a_module_of_others_is_left_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(None)
    stack: list[object] = [module]
    monkeypatch.setattr(parameter_offload, "FWD_MODULE_STACK", stack)
    wrap_destroy(lambda _: None)(SimpleNamespace(module=module))
    assert stack == [module]
