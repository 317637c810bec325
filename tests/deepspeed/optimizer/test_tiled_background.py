"""Steps that go on behind their caller: the same values, and nobody sees a half of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.errors import StoreError, TornStepError
from memascend.streaming.optimizer.sub_group_step import SubGroupStep
from tests.support.tiled_optimizer import NAMES, Tiled, stock_unused
from tests.support.tiled_training import SIZES, gradients, lose_drive_at

pytestmark = pytest.mark.deepspeed

BF16 = torch.bfloat16


def make(*, overlap: bool = True, **options: Any) -> Any:
    """Every parameter is on the drive or in host memory on its own."""
    return Tiled(
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2),
        block={"streaming": {"optimizer": {"overlap": overlap, "during_backward": False}}},
        stage3={"fp16_partitioned_groups_flat": [None] * len(NAMES)},
        **options,
    )


def step(optimizer: Any, number: int) -> None:
    """As DeepSpeed steps, up to what it does last."""
    optimizer.steps.finish()
    for name, value in gradients(number, BF16).items():
        optimizer.gradient_stream.put(name, 0, value)
    optimizer.steps.step(optimizer.step_all)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An optimizer whose second sub-group waits until it is told to go on."""
    optimizer = make()
    may_go = optimizer.may_go = threading.Event()
    stepped = optimizer.stream.step

    def hold(step: SubGroupStep, *arguments: Any) -> None:
        if step.name == NAMES[1]:
            assert may_go.wait(30)
        stepped(step, *arguments)

    monkeypatch.setattr(optimizer.stream, "step", hold)
    yield optimizer
    may_go.set()
    optimizer.runtime.background.finish()


def values(optimizer: Any) -> list[torch.Tensor]:
    optimizer.steps.finish()
    found = []
    for name in NAMES:
        found.append(optimizer.training.parameter(name))
        found += [optimizer.training.master(name, state) for state in (None, "exp_avg")]
    return found


def test_behind_the_caller_or_not_the_values_are_equal() -> None:
    behind, at_once = make(), make(overlap=False)
    for number in range(4):
        rate = 1e-2 / (number + 1)
        for optimizer in (behind, at_once):
            optimizer.base.param_groups[0]["lr"] = rate
            step(optimizer, number)
            assert optimizer.runtime.background.is_under_way == (optimizer is behind)
            optimizer.base.param_groups[0]["lr"] = 1e9  # as a scheduler, before the next step
    pairs = zip(values(behind), values(at_once), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_is_stepped_first_can_be_read_while_the_rest_goes_on(held: Any) -> None:
    at_once = make(overlap=False)
    step(at_once, 0)
    step(held, 0)
    walk = held.runtime.background
    walk.wait_for([f"param.{NAMES[0]}.0", f"param.{NAMES[0]}.1"])
    assert not walk.has_passed(f"param.{NAMES[1]}.0")
    parts = []
    for member in held.training.members[NAMES[0]][:2]:
        parts.append(torch.empty(member.numel, dtype=BF16))
        held.training.store.read(key=member.key, target=parts[-1]).wait()
    found = torch.cat(parts)
    assert torch.equal(found, at_once.training.parameter(NAMES[0])[: found.numel()])
    assert walk.is_under_way


def test_what_every_layer_needs_a_part_of_is_stepped_first(held: Any) -> None:
    """Norms and biases, which a Trainer gives a group of their own behind all others."""
    step(held, 0)
    walk = held.runtime.background
    walk.wait_for([f"param.{NAMES[2]}.0"])
    walk.wait_for([f"param.{NAMES[0]}.1"])
    assert not walk.has_passed(f"param.{NAMES[1]}.0")


def test_where_betas_differ_the_order_is_that_of_the_optimizer() -> None:
    """It has one running power of each for all."""
    behind, at_once = make(), make(overlap=False)
    for optimizer in (behind, at_once):
        (group,) = optimizer.base.param_groups
        optimizer.base.param_groups.append({**group, "betas": (0.8, 0.99), "params": []})
        optimizer.sub_group_to_group_id = {0: 0, 1: 1, 2: 0}
    for number in range(10):
        for optimizer in (behind, at_once):
            step(optimizer, number)
            assert optimizer.runtime.background.is_under_way == (optimizer is behind)
    pairs = zip(values(behind), values(at_once), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def _set_weight(optimizer: Any) -> None:
    optimizer.steps.values.state(None, False, None, stock_unused)
    assert optimizer.runtime.background.is_under_way
    optimizer.steps.values.put_back(stock_unused)


@pytest.mark.parametrize(
    "look",
    [
        lambda optimizer: optimizer.steps.settle(),
        lambda optimizer: optimizer.steps.begin_load(),
        lambda optimizer: optimizer.steps.refresh(stock_unused),
        _set_weight,
    ],
)
def test_who_looks_at_all_values_or_changes_one_waits_for_all(held: Any, look: Any) -> None:
    step(held, 0)
    threading.Timer(0.05, held.may_go.set).start()
    look(held)
    assert not held.runtime.background.is_under_way


@pytest.mark.parametrize(
    "look",
    [
        lambda optimizer: optimizer.steps.values.state(None, False, None, stock_unused)[0],
        lambda optimizer: optimizer.steps.values.state(None, False, "exp_avg", stock_unused)[0],
        lambda optimizer: optimizer.steps.values.gradient(None, False, stock_unused)[0],
    ],
)
def test_who_looks_at_one_value_waits_for_its_sub_group_alone(held: Any, look: Any) -> None:
    at_once = make(overlap=False)
    for number in range(2):  # of the first step states begin as one value
        for optimizer in (at_once, held):
            held.may_go.set()
            optimizer.steps.finish()
            held.may_go.clear()
            step(optimizer, number)
        assert torch.equal(look(held), look(at_once))
        walk = held.runtime.background
        assert not walk.has_passed(f"param.{NAMES[1]}.0")
    at_once.stage3.grad_position = held.stage3.grad_position = {0: (1, 0, 6)}
    threading.Timer(0.05, held.may_go.set).start()
    assert torch.equal(look(held), look(at_once))
    assert walk.has_passed(f"param.{NAMES[1]}.0")


def test_who_looks_at_one_value_gets_the_error_of_a_step_that_failed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()
    lose_drive_at(1, optimizer.stream, monkeypatch)
    step(optimizer, 0)
    optimizer.stage3.grad_position = {0: (2, 0, 6)}
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer.steps.values.state(None, False, None, stock_unused)
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer.steps.finish()


def test_an_error_comes_up_once_and_the_step_counts_as_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()
    lose_drive_at(3, optimizer.stream, monkeypatch)
    step(optimizer, 0)
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer.runtime.background.wait_for([f"param.{NAMES[1]}.0"])
    with pytest.raises(StoreError, match="the drive is gone"):
        optimizer.steps.finish()
    with pytest.raises(TornStepError):
        optimizer.steps.settle()


def test_a_step_whose_first_read_fails_counts_as_torn_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()

    def fail(*_: Any, **__: Any) -> None:
        raise StoreError(5, "the drive is gone")

    monkeypatch.setattr(optimizer.stream, "_due", fail)
    step(optimizer, 0)
    with pytest.raises(StoreError):
        optimizer.steps.finish()
    with pytest.raises(TornStepError):
        optimizer.steps.current.check()


def test_a_load_takes_over_whatever_the_walk_failed_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("not of the drive")

    monkeypatch.setattr(optimizer.stream, "_write_back", fail)
    step(optimizer, 0)
    optimizer.steps.begin_load()
    assert optimizer.steps.current.is_mixed
    assert not optimizer.runtime.background.is_under_way


def test_a_step_that_needs_more_than_tiles_is_over_first() -> None:
    optimizer = make()
    for name, numel in SIZES.items():  # set by the script, in fp32: goes through staging slots
        optimizer.gradient_stream.set(name, 0, torch.ones(numel))
    in_background = []
    unscale = optimizer.steps.unscale

    def look(*arguments: Any) -> None:
        in_background.append(optimizer.steps.current.in_background)
        unscale(*arguments)

    optimizer.steps.unscale = look
    optimizer.steps.step(optimizer.step_all)
    assert in_background == [False] * len(NAMES)
    assert not optimizer.runtime.background.is_under_way


@pytest.mark.parametrize("others", ["gradients", "parameters", "the step", "nobody"])
def test_where_others_keep_the_values_a_step_is_over_first(others: str) -> None:
    optimizer = make(streams_gradients=others != "gradients")
    if others == "parameters":
        for param in (param for group in optimizer.stage3.fp16_groups for param in group):
            param.nvme_swapper = None
            param.ds_tensor.data = torch.zeros(param.ds_tensor.ds_numel, dtype=BF16)
    if others == "the step":
        optimizer.base.register_step_pre_hook(lambda *_: None)
    step(optimizer, 0)
    assert optimizer.runtime.background.is_under_way == (others == "nobody")
    optimizer.steps.finish()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("is_tried_again", [True, False])
def test_a_step_whose_call_ctrl_c_ended_behind_the_last_value_is_made_once(
    overlap: bool, is_tried_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller takes it for not made, and may call again before the next gradient, or go on."""
    optimizer, other = make(overlap=overlap), make(overlap=overlap)
    restart = optimizer.steps._ahead.restart

    def interrupt() -> None:
        monkeypatch.setattr(optimizer.steps._ahead, "restart", restart)
        raise KeyboardInterrupt

    step(other, 0)
    monkeypatch.setattr(optimizer.steps._ahead, "restart", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(optimizer, 0)
    if is_tried_again:
        optimizer.steps.step(optimizer.step_all)
        assert all(map(torch.equal, values(optimizer), values(other)))
    optimizer.steps.current.note_pass()
    for number in (1, 2):
        step(other, number)
        step(optimizer, number)
    assert all(map(torch.equal, values(optimizer), values(other)))
