"""Weights of a layer are released once, behind its last slice, as DeepSpeed has decided."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.errors import ConfigError

pytestmark = pytest.mark.deepspeed


class Parameter:
    """A parameter as DeepSpeed knows it."""

    requires_grad = True
    ds_process_group = None
    ds_status: Any = None


class Module:
    """A module with parameters of its own."""

    def __init__(self, ds_id: int, *params: Parameter) -> None:
        self.ds_id, self._params = ds_id, params

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._params)

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter((str(number), one) for number, one in enumerate(self._params))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    from memascend.deepspeed.slices import held as file

    monkeypatch.setattr(file, "z3_leaf_module", lambda module: False)
    monkeypatch.setattr(
        file.parameter_offload, "iter_params", lambda module, recurse: module.parameters()
    )
    return file.HeldParameters()


def test_releases_wait_for_the_end(held: Any) -> None:
    mine, other = Parameter(), Parameter()
    released: list[Any] = []

    def release(_: object, param: Any, *rest: Any) -> None:
        released.append((param, *rest))

    with held.holding([mine]):
        assert held.keeps(release, "coordinator", mine, True)
        assert not held.keeps(release, "coordinator", other, True)
        assert released == []
    assert released == [(mine, True)]
    assert not held.keeps(release, "coordinator", mine)


def test_modules_of_the_first_slice_are_hidden_in_later_ones(held: Any) -> None:
    mine, other = Parameter(), Parameter()
    first, late, outside = Module(1, mine), Module(2, mine), Module(3, mine, other)
    assert not held.hides(first)
    with held.holding([mine]) as begin_slice:
        begin_slice(0)
        assert not held.hides(first)
        assert not held.hides(outside)
        begin_slice(1)
        assert held.hides(first)
        assert not held.hides(late)  # the first slice did not use it
        assert not held.hides(outside)  # its other parameter is not held
        assert held.others() == {"Module"}
        with held.holding([other]) as begin_inner:
            begin_inner(0)
            assert not held.hides(first)
        assert held.hides(first)
    assert not held.hides(first)


@pytest.mark.parametrize(
    ("world", "status", "is_refused"),
    [(2, "NOT_AVAILABLE", True), (1, "NOT_AVAILABLE", False), (2, "AVAILABLE", False)],
)
def test_several_ranks_gather_nothing_in_later_slices(
    held: Any, monkeypatch: pytest.MonkeyPatch, world: int, status: str, is_refused: bool
) -> None:
    from memascend.deepspeed.slices import held as file

    monkeypatch.setattr(file.dist, "get_world_size", lambda group: world)
    monkeypatch.setattr(file.parameter_offload, "FWD_MODULE_STACK", [held, []])
    first, late = Parameter(), Parameter()
    late.ds_status = file.ZeroParamStatus[status]
    with held.holding([first, late]) as begin_slice:
        begin_slice(0)
        assert not held.hides(Module(1, first))
        begin_slice(1)
        if not is_refused:
            assert not held.hides(Module(2, late))
            return
        with pytest.raises(ConfigError, match=r"Module \(in HeldParameters > list\).*leaf_module"):
            held.hides(Module(2, late))


def test_modules_that_an_error_leaves_on_deepspeeds_stack_are_removed(held: Any) -> None:
    """Parameters that another module reads would be registered as theirs."""
    from memascend.deepspeed.slices.held import parameter_offload

    stack = parameter_offload.FWD_MODULE_STACK
    before = list(stack)
    with held.holding([]) as begin_slice:
        stack.append("a module in a slice that fails")
        begin_slice(1)
        assert stack == before
        stack.append("another one")
    assert stack == before
