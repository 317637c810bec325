"""A weight that is used outside its module is whole there, however far its gather is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

from memascend.deepspeed.parameters import access
from memascend.errors import StoreError
from tests.support.gather_bench import ABSENT, FLYING, THERE, Bench


class Model:
    """A root whose forward pass is under way, and one child for each parameter of a bench."""

    def __init__(self, bench: Bench, patch: pytest.MonkeyPatch) -> None:
        self.registered: list[tuple[Any, int]] = []
        self.stack: list[Any] = ["root"]
        self.children = [SimpleNamespace() for _ in bench.params]
        for child, param in zip(self.children, bench.params, strict=True):
            child._parameters = ZeROOrderedDict(parent_module=child)
            child._parameters |= {"weight": param, "bias": None}
            child._parameters._in_forward = True
        patch.setattr(access, "FWD_MODULE_STACK", self.stack)
        patch.setattr(access, "register_external_parameter", self.register)
        self.get = access.wrap_access(ZeROOrderedDict.__getitem__)

    def register(self, module: Any, param: Any) -> None:
        self.registered.append((module, param.ds_id))

    def use(self, index: int) -> Any:
        return self.get(self.children[index]._parameters, "weight")


@pytest.fixture(params=[True, False], ids=["alone", "several ranks"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(is_alone=request.param)


@pytest.fixture
def model(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Model:
    return Model(bench, monkeypatch)


@pytest.mark.parametrize("has_arrived", [True, False])
def test_what_is_gathered_ahead_is_whole_and_the_modules_from_then_on(
    bench: Bench, model: Model, has_arrived: bool
) -> None:
    bench.prefetch(0, 1)
    if has_arrived:
        bench.finish_read(0)
    bench.gather(0, 1)
    assert model.use(0) is bench.params[0]
    assert bench.is_whole(0)
    assert bench.statuses() == [THERE, FLYING, ABSENT]
    assert model.registered == [("root", 0)]
    model.use(0)
    assert model.registered == [("root", 0)]
    bench.wait(1)
    bench.params[0].ds_status = ABSENT  # let go behind the root
    bench.gather(0)
    bench.wait(0)
    assert bench.is_whole(0)


def test_what_came_with_the_rest_of_its_list_is_the_modules_too(bench: Bench, model: Model) -> None:
    """Else backward finds it absent, or not, as the drive was quick."""
    bench.gather(0, 1)
    bench.wait(0, 1)
    for index in (0, 1):
        bench.params[index].ds_status = ABSENT
    bench.prefetch(0, 1)
    handle = bench.gather(0, 1)
    handle.wait()
    assert bench.statuses()[:2] == [THERE] * 2
    model.use(1)
    assert model.registered == [("root", 1)]
    assert list(bench.registry) == [0]


def test_a_module_has_its_own_weight_as_it_is(bench: Bench, model: Model) -> None:
    bench.prefetch(0)
    bench.gather(0)
    model.stack.append(model.children[0])
    model.use(0)
    assert bench.statuses()[0] is FLYING
    bench.wait(0)
    model.stack.pop()
    model.use(0)  # while it is kept
    assert model.registered == []


def test_outside_of_a_forward_pass_and_in_a_graph_nothing_is_gathered(
    bench: Bench, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.prefetch(0)
    bench.gather(0)
    model.children[0]._parameters._in_forward = False
    model.use(0)
    model.children[0]._parameters._in_forward = True
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        model.use(0)
    assert bench.statuses()[0] is FLYING
    assert model.registered == []


def test_what_is_none_or_of_others_passes_through(bench: Bench, model: Model) -> None:
    parameters = model.children[0]._parameters
    assert model.get(parameters, "bias") is None
    parameters["weight"] = plain = torch.nn.Parameter(torch.ones(1))
    assert model.use(0) is plain
    model.stack.clear()  # behind engine.destroy()
    assert model.use(0) is plain
    assert model.registered == []


def test_a_read_that_fails_is_told_where_the_weight_is_used(bench: Bench, model: Model) -> None:
    bench.store.failing.add(("read", "param.0"))
    bench.prefetch(0)
    bench.gather(0)
    with pytest.raises(StoreError):
        model.use(0)
    assert bench.statuses()[0] is ABSENT
