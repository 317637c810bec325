"""Backward passes under way, left by an error, and inside one another; their graphs really run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memascend.config import installed
from memascend.config.installed import INNER_PASSES
from memascend.deepspeed.optimizer.passes import BackwardPasses, PassHooks, wrap_backward
from memascend.errors import ConfigError, IncompleteGradientError


class UserError(Exception):
    """An error of the script's own."""


def loss_with(*hooks: Callable[[], object]) -> torch.Tensor:
    """A loss whose backward pass calls the hooks, one after the other."""
    loss = torch.ones((), requires_grad=True) * 1.0
    for hook in hooks:
        loss.register_hook(lambda _, hook=hook: hook() and None)
    return loss


def fail() -> None:
    raise UserError


def run_pass(passes: BackwardPasses, *hooks: Callable[[], object]) -> None:
    """A pass of the engine's own, as torch-style backward runs it."""
    with torch.enable_grad():
        loss_with(passes.enter, *hooks).backward()


def test_a_pass_that_ran_to_its_end_was_not_left() -> None:
    passes = BackwardPasses()
    run_pass(passes)
    assert not passes.was_left()
    passes.check()
    with passes.ending():
        pass
    assert not passes.continues()


def test_a_pass_that_an_error_left_is_told_from_one_that_runs() -> None:
    passes = BackwardPasses()
    seen: list[tuple[bool, bool]] = []

    def look() -> None:
        seen.append((passes.continues(), passes.was_left()))

    with pytest.raises(UserError):
        run_pass(passes, look, fail)
    look()
    assert seen == [(True, False), (False, True)]
    with pytest.raises(IncompleteGradientError, match="another forward pass"):
        passes.check()
    passes.reset()
    passes.check()


def test_outputs_of_one_graph_are_one_pass() -> None:
    passes = BackwardPasses()
    news: list[bool] = []
    run_pass(passes, lambda: news.append(passes.enter()))
    assert news == [False]
    run_pass(passes)  # and another graph is another one
    assert not passes.was_left()


def test_a_call_that_failed_was_left_even_where_the_passes_in_it_ended() -> None:
    """GradCache: a hook of the loss runs whole passes, and fails between them."""
    passes = BackwardPasses()
    with pytest.raises(UserError), passes.calling():
        loss_with(lambda: run_pass(passes), lambda: None, fail).backward()
    assert passes.was_left()


def test_passes_inside_a_call_are_kept_until_it_ends() -> None:
    passes = BackwardPasses()
    found: list[object] = []

    def one(number: int) -> None:
        found.append(passes.continues())
        if passes.continues():
            passes.keep()
        run_pass(passes, lambda: passes.note_reduced([number]))
        found.append([passes.adds(1), passes.adds(2)])

    with passes.calling():
        loss_with(lambda: one(1), lambda: one(2)).backward()
        with passes.ending():
            assert not passes.is_inner
    assert found == [False, [False, False], True, [True, False]]
    assert not passes.adds(1)


def test_a_call_inside_a_call_ends_nothing() -> None:
    passes = BackwardPasses()
    with passes.calling():
        with passes.calling():
            run_pass(passes, lambda: passes.note_reduced([1]))
            with passes.ending():
                assert passes.is_inner
                passes.keep()
        assert passes.adds(1)
        with passes.ending():
            pass
    assert not passes.adds(1)


@pytest.mark.parametrize("again", [True, False])
def test_an_error_that_a_hook_has_caught_is_raised_where_gradients_are_used(again: bool) -> None:
    passes = BackwardPasses()

    def catch() -> None:
        with pytest.raises(UserError):
            run_pass(passes, fail)
        assert not passes.was_left(), "the outer pass still runs"
        if again:
            run_pass(passes)

    def call() -> None:
        with passes.calling():
            loss_with(catch).backward()
            with passes.ending():
                raise AssertionError("gradients were used")

    with pytest.raises(IncompleteGradientError):
        call()
    assert passes.was_left()


def test_a_pass_inside_one_of_the_same_engine_is_refused() -> None:
    """Its gradients would land in the buckets among those of the outer one."""
    passes = BackwardPasses()
    with pytest.raises(IncompleteGradientError, match="GradCache"):
        run_pass(passes, lambda: run_pass(passes))


def test_an_inner_call_is_refused_where_deepspeed_cannot_count_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "is_able", lambda ability: ability is not INNER_PASSES)
    hooks = PassHooks(SimpleNamespace(), restart=fail)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"own backward pass .* 0\.18\.5 or later"):
        run_pass(hooks.passes, lambda: hooks.begin_forward(fail, fail))
    assert hooks.passes.was_left()


def test_an_error_in_the_reduction_leaves_the_pass() -> None:
    passes = BackwardPasses()
    run_pass(passes)
    with pytest.raises(UserError), passes.ending():
        raise UserError
    assert passes.was_left()


def test_calls_of_an_engine_are_noted_and_what_was_left_is_dropped_first() -> None:
    dropped: list[bool] = []
    upstream: Any = SimpleNamespace(drop_unreduced=lambda: dropped.append(hooks.passes.was_left()))
    hooks = PassHooks(upstream, lambda: None)
    optimizer = SimpleNamespace(passes=hooks)

    def original(engine: Any, loss: str, *, fails: bool) -> str:
        if fails:
            raise UserError
        return loss

    backward = wrap_backward(original)
    engine = SimpleNamespace(optimizer=optimizer)
    with pytest.raises(UserError):
        backward(engine, "loss", fails=True)
    assert backward(engine, "loss", fails=False) == "loss"
    assert dropped == [True]
    assert backward(SimpleNamespace(optimizer=None), "stock", fails=False) == "stock"


class Slices:
    """A pass in slices in which every gradient is complete."""

    def deliver_late(self) -> None:
        raise AssertionError("the pass does not end")

    def take(self, params: Any, parts: Any) -> Any:
        return params, parts


def test_a_gradient_that_would_replace_one_of_its_pass_is_an_error() -> None:
    """A weight used in a layer in slices, and outside of it by hand: each use brings a gradient."""
    upstream = SimpleNamespace(name_of=lambda param: param.name)
    hooks = PassHooks(upstream, restart=fail)  # type: ignore[arg-type]
    one, other = (SimpleNamespace(ds_id=number, name=f"layer.{number}") for number in range(2))
    stored: list[Any] = []

    def store(params: list[Any], partitions: list[Any]) -> list[Any]:
        stored.extend(params)
        return []

    hooks.put([one], [None], store)
    hooks.put([one], [None], store)  # without slices DeepSpeed decides
    hooks.slices = Slices()
    hooks.put([other], [None], store)
    with pytest.raises(ConfigError, match=r"layer\.1 came twice .* memascend.micro_batches"):
        hooks.put([other], [None], store)
    assert stored == [one, one, other]
    hooks.passes.reset()
    hooks.put([other], [None], store)
