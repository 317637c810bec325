"""Muon's steps during backward: the same values, and no update that is taken for a gradient."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memascend.deepspeed.optimizer.muon import MuonUpdates
from memascend.errors import GradientGoneError, StoreError, StoreFullError
from memascend.plan.optimizers import MOMENTUM
from memascend.streaming.optimizer.sub_group_step import early_key
from tests.support.early_muon import (
    assert_equal,
    backward,
    make,
    muon_update,
    step,
    train,
)
from tests.support.early_optimizer import LEFT_TILES, TILES, all_early
from tests.support.tiled_optimizer import NAMES

pytestmark = pytest.mark.deepspeed

EARLY = TILES  # in each step
MATRIX = (NAMES[0], 0)  # of two tiles, none of which is left


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.muon import original_muon

    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda *group: 1)
    monkeypatch.setattr(original_muon, "muon_update", muon_update)


def both(count: int, **changes: Any) -> tuple[Any, Any]:
    """Two that have made so many steps, one of them from the third on during backward."""
    early, late = make(**changes), make(early=False, **changes)
    for optimizer in (early, late):
        train(optimizer, range(count))
    assert early.steps.early_tile_count == EARLY * max(0, count - 2)
    assert_equal(early, late)
    return early, late


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_steps_during_backward_have_the_values_of_those_after_it(scale: float) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    for count in (2, 3, 6):
        both(count, loss_scaler=LossScaler(scale))
    assert len(LEFT_TILES) == 2


def test_a_loss_scale_that_grows_behind_the_updates_is_that_of_the_step_alone() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    early, late = make(), make(early=False)
    for optimizer in (early, late):
        optimizer.stage3.loss_scaler = DynamicLossScaler(4.0, 2, 1.0, 1, False)
        train(optimizer, range(6))
        assert optimizer.stage3.loss_scale > 8.0
    assert early.steps.early_tile_count == 4 * EARLY
    assert_equal(early, late)


def test_a_gradient_is_added_to_those_before_on_the_device() -> None:
    early, late = both(2)
    for optimizer in (early, late):
        optimizer.runtime.background.finish()
        micro_step(optimizer, 7)
        optimizer.stage3.micro_step_id = 1
        backward(optimizer, 8)
        all_early(optimizer)
        step(optimizer)
        optimizer.stage3.micro_step_id = 0
    assert early.steps.early_tile_count == EARLY
    assert_equal(early, late)


def micro_step(optimizer: Any, number: int) -> None:
    """Gradients of a micro-step that is not the last one."""
    from tests.support.tiled_training import gradients

    for name, value in gradients(number, torch.bfloat16).items():
        for member in optimizer.training.members[name]:
            part = value[member.offset : member.offset + member.numel]
            optimizer.gradient_stream.put(name, member.offset, part, final=False)


def change(name: str, value: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.base.param_groups[0].__setitem__(name, value)


def grow_scale(optimizer: Any) -> None:
    optimizer.stage3.loss_scaler.cur_scale *= 2


def clip(optimizer: Any) -> None:
    optimizer.stage3.clip_grad = 0.5


def hook(optimizer: Any) -> None:
    optimizer.base.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (change("lr", 0.05), "lr of sub-group 0 went from 0.1 to 0.05 between backward and step()"),
        (change("momentum", 0.25), "momentum of sub-group 0 went from 0.5 to 0.25"),
        (change("ns_method", "gram"), "ns_method of sub-group 0 went from standard to gram"),
        (grow_scale, "loss_scale of sub-group 0 went from 4.0 to 8.0"),
        (clip, "gradient_clipping of sub-group 0 went from 0.0 to 0.5"),
        (hook, "the optimizer has to make this step by itself"),
    ],
)
def test_a_change_after_backward_is_refused_and_training_goes_on(
    changes: Callable[[Any], None], words: str
) -> None:
    early, late = both(3)
    backward(early, 3)
    all_early(early)
    changes(early)
    with pytest.raises(GradientGoneError, match=re.escape(words)):
        step(early)
    changes(late)
    early.steps.settle()  # as before a checkpoint
    late.stage3.norm_for_param_grads = dict(early.stage3.norm_for_param_grads)
    assert_equal(early, late)
    for optimizer in (early, late):
        if changes is not clip:  # which would divide a norm that this step does not have
            train(optimizer, range(3, 5))
    assert_equal(early, late)


@pytest.mark.parametrize("left_out", ["before", "behind"])
def test_a_step_that_is_left_out_leaves_weights(left_out: str) -> None:
    """Momentum has moved on if the norm of the updates is not finite, as with CPU offload."""
    early, late = both(3)
    for optimizer in (early, late):
        backward(optimizer, 3)
        all_early(optimizer)
        step(optimizer, left_out=left_out)
    early.stage3.norm_for_param_grads = dict(late.stage3.norm_for_param_grads)
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(4, 6))
    assert_equal(early, late)


def test_another_backward_pass_replaces_the_one_before() -> None:
    early, late = both(3)
    for optimizer in (early, late):
        backward(optimizer, 8)
        all_early(optimizer)
        backward(optimizer, 3)
        step(optimizer)
    assert_equal(early, late)


def test_an_update_is_never_taken_for_the_gradient_of_a_parameter_that_got_none() -> None:
    """Neither that of the pass before, which another one replaces in part, nor of a step before."""
    early, late = both(3)
    backward(early, 8)
    backward(early, 3, without=[MATRIX])
    with pytest.raises(GradientGoneError, match=r"param.0_3.0 got no gradient this time"):
        step(early)
    for optimizer in (early, late):
        train(optimizer, range(3, 5))
    backward(early, 5, without=[(NAMES[0], 1)])
    with pytest.raises(GradientGoneError, match=r"param.0_3.1 got no gradient this time"):
        step(early)
    assert_equal(early, late)


def test_a_parameter_without_a_gradient_in_a_watched_step_is_never_early() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1))
        for number, without in enumerate([[MATRIX], [], [MATRIX], [MATRIX], []], 1):
            train(optimizer, range(number, number + 1), without=without)
    assert 0 < early.steps.early_tile_count < 4 * EARLY
    assert_equal(early, late)


def test_an_update_is_not_read_as_a_gradient_and_nothing_is_added_to_it() -> None:
    early, _ = both(3)
    backward(early, 3)
    name, place = NAMES[1], early.stage3.grad_position[10]
    with pytest.raises(GradientGoneError, match="cannot read a gradient"):
        early.gradient_stream.get(name, place[1], torch.empty(place[2]))
    early.stage3.micro_step_id = 1
    with pytest.raises(GradientGoneError, match="cannot add another backward pass"):
        backward(early, 4)


def test_a_script_that_reads_gradients_while_it_is_watched_may_go_on() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1))
        optimizer.steps.note_look()
        train(optimizer, range(1, 5))
    assert isinstance(early.steps._ahead, MuonUpdates)
    assert_equal(early, late)


def test_updates_under_autocast_are_made_after_backward() -> None:
    """A script may step under it, or bring gradients under it alone: bits are those of the step."""
    early, late = both(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(early, 3)
        all_early(early)
        with pytest.raises(GradientGoneError, match="it is made under"):
            step(early)
        for optimizer in (early, late):
            train(optimizer, range(3, 6))
    assert early.steps.early_tile_count == EARLY
    assert_equal(early, late)


def test_without_device_memory_updates_are_made_after_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradient is overwritten by then: it has to be kept."""
    from deepspeed.runtime.zero.muon import original_muon

    early, late = both(3)

    def overwrite_and_fail(gradient: torch.Tensor, *_: Any, **options: Any) -> None:
        gradient.zero_()
        raise torch.OutOfMemoryError

    backward(late, 3)
    monkeypatch.setattr(original_muon, "muon_update", overwrite_and_fail)
    backward(early, 3)
    monkeypatch.setattr(original_muon, "muon_update", muon_update)
    for optimizer in (early, late):
        step(optimizer)
        train(optimizer, range(4, 6))
    assert caplog.text.count("no memory for updates of Muon during backward") == 1
    assert early.steps.early_tile_count == EARLY
    assert_equal(early, late)


@pytest.mark.parametrize("cause", ["no memory", "autocast"])
def test_matrices_take_their_updates_if_adams_steps_alone_begin_during_backward(
    cause: str,
) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    early, late = (
        make(early=one, has_others=True, loss_scaler=LossScaler(1.0)) for one in (True, False)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cause == "autocast"):
        for optimizer in (early, late):
            train(optimizer, range(3))
        if cause == "no memory":
            assert early.steps.early_tile_count == EARLY
            early.steps._muon.give_up_early()
        before = early.steps.early_tile_count
        for optimizer in (early, late):
            train(optimizer, range(3, 6))
    of_adam = -(-early.training.members[NAMES[1]][-1].numel * 2 // 4096)
    assert 0 < early.steps.early_tile_count - before <= 3 * of_adam
    assert_equal(early, late)


def test_a_limit_of_the_norm_that_a_script_sets_has_steps_after_backward() -> None:
    early, late = both(3)
    for optimizer in (early, late):
        optimizer.stage3.clip_grad = 1e6
        train(optimizer, range(3, 5))
    assert early.steps.early_tile_count == EARLY
    assert_equal(early, late)


def test_a_failed_write_of_momentum_that_another_caller_has_caught_stops_the_step() -> None:
    early, late = both(3)
    backward(early, 3)
    key = early_key(early.groups.group(NAMES[0]).key(MOMENTUM))
    early.runtime.staging._writes._failed.add(key)
    with pytest.raises(StoreError, match="new momentum of Muon could not be written"):
        step(early)
    early.steps.settle()
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(3, 5))
    assert_equal(early, late)


def test_without_room_on_the_drive_steps_stay_after_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = both(2)

    def refuse(*arguments: Any, **keywords: Any) -> bool:
        raise StoreFullError(28, "no space")

    monkeypatch.setattr(early.steps._muon._applying.values, "reserve", refuse)
    for optimizer in (early, late):
        train(optimizer, range(2, 5))
    assert "has no effect from now on: the drive has no room" in caplog.text
    assert early.steps.early_tile_count == 0
    assert_equal(early, late)


def test_a_write_of_momentum_that_fails_leaves_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early, late = both(3)
    backward(early, 3)

    def fail() -> None:
        raise StoreError(5, "the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(early.runtime.staging, "wait_writes", fail)
        with pytest.raises(StoreError):
            step(early)
    early.steps.settle()
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(3, 5))
    assert_equal(early, late)


def test_second_values_are_given_back_in_the_end() -> None:
    early, _ = both(3)
    early.steps.finish()
    early.steps.discard(SimpleNamespace())
    keys = early.training.store.keys()
    assert [key for key in keys if key.startswith("early.")] == []
