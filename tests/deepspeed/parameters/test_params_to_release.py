"""Which parameters of a module are released is decided for one trace, and keeps nothing alive."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import (
    PartitionedParameterCoordinator,
    ZeRoTraceMode,
)

from memascend.deepspeed.parameters.module_trace import ReleaseDecisions
from memascend.deepspeed.parameters.params_to_release import wrap_params_to_release
from memascend.deepspeed.parameters.swapper import ParameterSwapper

_PREFIX = "_PartitionedParameterCoordinator__"
# Not ours, where something in this process has armed the seams.
_ORIGINAL = inspect.unwrap(vars(PartitionedParameterCoordinator)[f"{_PREFIX}params_to_release"])


@pytest.fixture
def modules() -> list[torch.nn.Module]:
    """Three layers of ours; their parameters' ids are 0 to 5, two in each."""
    swapper = ParameterSwapper.__new__(ParameterSwapper)
    swapper.releases = ReleaseDecisions()
    layers: list[torch.nn.Module] = [torch.nn.Linear(2, 2) for _ in range(3)]
    numbers = iter(range(6))
    for number, layer in enumerate(layers):
        prepare(layer, 10 + number)
        for param in layer.parameters():
            param.nvme_swapper = swapper  # type: ignore[attr-defined]
            param.ds_id, param.ds_numel = next(numbers), param.numel()  # type: ignore[attr-defined]
            param.ds_persist = False  # type: ignore[attr-defined]
    return layers


def prepare(module: Any, number: int) -> None:
    module.ds_id = number
    parameter_offload._init_external_params(module)


def coordinator_of(order: Iterable[torch.nn.Module]) -> Any:
    made = PartitionedParameterCoordinator(
        prefetch_bucket_sz=0,
        max_reuse_distance_in_numel=100,
        max_available_parameters_in_numel=0,
        allgather_stream=None,
        inflight_param_registry={},
    )
    set_trace(made, order)
    return made


def set_trace(coordinator: Any, order: Iterable[torch.nn.Module]) -> None:
    setattr(coordinator, f"{_PREFIX}trace_mode", ZeRoTraceMode.COMPLETE)
    setattr(coordinator, f"{_PREFIX}submodule_order", tuple(order))


def test_they_are_those_of_the_present_trace(modules: list[torch.nn.Module]) -> None:
    first, second, third = modules
    coordinator = coordinator_of([first, second, first])
    released = wrap_params_to_release(_ORIGINAL)
    assert released(coordinator, first, 1) == set(), "it is used again"
    set_trace(coordinator, [first, second, third])
    assert released(coordinator, first, 1) == {0, 1}
    set_trace(coordinator, [first, first, second])
    assert released(coordinator, first, 1) == set(), "the very next module uses it"
    set_trace(coordinator, [first, third, second, first])
    assert released(coordinator, first, 1) == set()
    assert released(coordinator, first, 4) == {0, 1}


def test_a_trace_is_looked_through_once(
    modules: list[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = coordinator_of(modules)
    released = wrap_params_to_release(_ORIGINAL)
    found = released(coordinator, modules[0], 1)
    found.add(7)  # DeepSpeed adds to what it is given
    monkeypatch.setattr(coordinator, f"{_PREFIX}max_reuse_dist_in_numel", None)  # would raise
    assert released(coordinator, modules[0], 1) == {0, 1}


def test_nothing_is_kept_alive(modules: list[torch.nn.Module]) -> None:
    empty = torch.nn.Sequential(modules.pop())
    prepare(empty, 20)
    coordinator = coordinator_of([modules[0], empty])
    released = wrap_params_to_release(_ORIGINAL)
    assert released(coordinator, empty, 1) == set()
    assert released(coordinator, modules[0], 1) == {0, 1}
    gone = [weakref.ref(one) for one in (coordinator, empty, modules[0])]
    modules.clear()
    del coordinator, empty
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_a_module_of_others_is_left_to_deepspeed() -> None:
    module = torch.nn.Linear(2, 2)
    prepare(module, 30)
    asked: list[tuple[object, ...]] = []

    def original(*arguments: object) -> str:
        asked.append(arguments)
        return "its own"

    original.cache_clear = None  # type: ignore[attr-defined]
    original.__wrapped__ = None  # type: ignore[attr-defined]
    assert wrap_params_to_release(original)("coordinator", module, 1) == "its own"
    assert asked == [("coordinator", module, 1)]
