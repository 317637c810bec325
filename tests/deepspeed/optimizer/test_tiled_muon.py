"""Muon in tiles: updates come before the norm, and an end between them and the walk is no step."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.ahead import WorkAhead
from memascend.errors import StoreError, TornStepError
from memascend.plan.optimizers import MOMENTUM
from memascend.streaming.optimizer.step import StepPhase
from tests.support.tiled_optimizer import NAMES, Tiled, stock_unused
from tests.support.tiled_training import gradients

BF16 = torch.bfloat16


class Updates:
    """Stands for the updates of matrices, and may fail half-way."""

    momentum_dtype = BF16

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.count = error, 0

    def stream_momentum(self, name: str) -> Iterator[str]:
        return iter([name])

    def begin(self, step: Any, early: Any, reason: str) -> None:
        step.note_updates()

    def take_results(self, step: Any) -> tuple[dict[str, frozenset[int]], str]:
        return {}, ""

    def update_all(self) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error


def muon(params: list[torch.nn.Parameter]) -> Any:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return MuonWithAuxAdam([{"params": params, "use_muon": True, "lr": 0.1}])


@pytest.fixture
def optimizer() -> Tiled:
    tiled = Tiled(muon)
    for name in NAMES:
        tiled.groups.group(name).apart = frozenset({MOMENTUM})
    updates: Any = Updates()
    tiled.steps._muon = updates
    tiled.steps.momentum_dtype = BF16
    for name, value in gradients(0, BF16).items():
        tiled.gradient_stream.put(name, 0, value)
    return tiled


def step(optimizer: Tiled, then: Any = None) -> None:
    def original() -> None:
        optimizer.steps.update_matrices(stock_unused)
        (then or optimizer.step_all)()

    optimizer.steps.step(original)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_updates_are_made_once_and_momentum_is_in_no_tile(optimizer: Tiled) -> None:
    step(optimizer)
    assert optimizer.steps._muon.count == 1  # type: ignore[union-attr]
    for name, master in zip(NAMES, optimizer.masters, strict=True):
        group = optimizer.groups.group(name)
        assert group.states == {MOMENTUM: BF16}
        assert group.tile_states == {}
        assert optimizer.base.state[master][MOMENTUM].dtype == BF16
    optimizer.steps.finish()
    optimizer.steps.current.check()
    step(optimizer)


def test_results_of_backward_are_compared_before_the_first_step_makes_states(
    optimizer: Tiled,
) -> None:
    """Else a count of steps that begins would be a change between backward and step()."""
    found = []

    class Ahead(WorkAhead):
        def take_results(self, step: Any) -> tuple[dict[str, frozenset[int]], str]:
            found.append(dict(optimizer.groups.group(NAMES[0]).states))
            return {}, ""

    optimizer.steps._ahead = Ahead()
    step(optimizer)
    assert found == [{}]


def test_a_step_that_is_skipped_after_the_updates_tears_nothing(optimizer: Tiled) -> None:
    """The norm is not finite: momentum of other matrices has moved on, as with CPU offload."""
    step(optimizer, lambda: None)
    assert optimizer.steps.current.phase is StepPhase.COLLECTING
    optimizer.steps.settle()
    step(optimizer)


@pytest.mark.parametrize("error", [StoreError("gone"), KeyboardInterrupt()])
def test_updates_that_end_half_way_are_not_made_again(
    optimizer: Tiled, error: BaseException
) -> None:
    optimizer.steps._muon.error = error  # type: ignore[union-attr]
    with pytest.raises(type(error)):
        step(optimizer)
    optimizer.steps._muon.error = None  # type: ignore[union-attr]
    assert_torn_until_a_load(optimizer)


def test_an_end_between_the_updates_and_the_walk_is_torn(optimizer: Tiled) -> None:
    """An update would be taken for a gradient by the next step."""
    with pytest.raises(KeyboardInterrupt):
        step(optimizer, raise_interrupt)
    assert_torn_until_a_load(optimizer)


def test_a_walk_that_does_not_begin_tears_the_step(optimizer: Tiled) -> None:
    """Momentum has moved on, though no weight has changed."""
    start = optimizer.steps._stream.start
    optimizer.steps._stream.start = lambda _: raise_interrupt()  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        step(optimizer)
    optimizer.steps._stream.start = start  # type: ignore[method-assign]
    assert_torn_until_a_load(optimizer)


def assert_torn_until_a_load(optimizer: Tiled) -> None:
    with pytest.raises(TornStepError):
        step(optimizer)
    with pytest.raises(TornStepError):
        optimizer.steps.settle()
    optimizer.steps.begin_load()
    optimizer.steps.mend()
    step(optimizer)
    optimizer.steps.settle()


def test_another_optimizer_has_no_updates() -> None:
    tiled = Tiled(lambda params: torch.optim.SGD(params, lr=0.1))
    tiled.steps.update_matrices(stock_unused)
    assert tiled.steps.current.phase is StepPhase.COLLECTING


def test_a_checkpoint_has_momentum_in_the_dtype_of_master_weights(optimizer: Tiled) -> None:
    step(optimizer)
    optimizer.steps.settle()
    states = {state: (dtype, read) for state, dtype, read in optimizer.steps.stored(NAMES[0])}
    assert set(states) == {None, MOMENTUM}
    dtype, read = states[MOMENTUM]
    assert dtype == torch.float32
    assert list(read()) == [NAMES[0]]


def test_momentum_of_a_checkpoint_is_read_back_in_its_own_dtype(optimizer: Tiled) -> None:
    step(optimizer)
    value = torch.full((optimizer.groups.group(NAMES[0]).numel,), 0.5, dtype=BF16)

    def fill(offset: int, target: torch.Tensor) -> None:
        target.copy_(value.view(torch.uint8)[offset : offset + target.numel()])

    optimizer.steps.begin_load()
    optimizer.steps.discard_states()
    loaded = SimpleNamespace(
        sub_group=0, state=MOMENTUM, dtype=BF16, reader=SimpleNamespace(fill=fill)
    )
    optimizer.steps.load_tensor(loaded)
    optimizer.steps.mend()
    group = optimizer.groups.group(NAMES[0])
    assert group.states == {MOMENTUM: BF16}
    assert group.tile_states == {}
    found = torch.empty(group.numel)
    optimizer.groups.get(group.name, 0, found, state=MOMENTUM)
    assert found.unique().tolist() == [0.5]
