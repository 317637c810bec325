"""Gradients that steps during backward have used up: who is refused, who is watched first."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.errors import GradientGoneError, StoreError
from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.sub_group_step import early_key
from tests.support.early_optimizer import (
    TILES,
    all_early,
    assert_equal,
    backward,
    change_rate,
    give,
    make,
    step,
    train,
)
from tests.support.tiled_optimizer import NAMES, stock_unused
from tests.support.tiled_training import SIZES, gradients

pytestmark = pytest.mark.deepspeed


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)


def grow_scale(optimizer: Any) -> None:
    optimizer.stage3.loss_scaler.cur_scale *= 2


def set_state(optimizer: Any) -> None:
    value, _ = optimizer.steps.values.state(None, False, "exp_avg", stock_unused)
    value.fill_(3.0)
    optimizer.steps.values.put_back(stock_unused)


def change_betas_in_place(optimizer: Any) -> None:
    optimizer.base.param_groups[0]["betas"][0] = 0.5


def clip(optimizer: Any) -> None:
    optimizer.stage3.clip_grad = 0.5


def hook(optimizer: Any) -> None:
    optimizer.base.register_step_pre_hook(lambda *_: None)


CHANGES = [
    (change_rate, "lr of sub-group 0 went from 0.01 to 0.005 between backward and step()"),
    (grow_scale, "loss_scale of sub-group 0 went from 4.0 to 8.0"),
    (set_state, "a value was set between backward and step()"),
    (change_betas_in_place, "betas of sub-group 0 went from [0.9, 0.95] to [0.5, 0.95]"),
    (clip, "gradient_clipping of sub-group 0 went from 0.0 to 0.5"),
    (hook, "the optimizer has to make this step by itself"),
]


@pytest.mark.parametrize("change", [change for change, _ in CHANGES])
def test_what_changes_in_a_watched_step_counts_and_nothing_is_early_then(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1))
        backward(optimizer, 1)
        change(optimizer)
        step(optimizer)
        train(optimizer, range(2, 5))
    assert early.steps.early_tile_count == 0
    assert_equal(early, late)


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_changes_later_is_refused_and_training_goes_on(
    change: Callable[[Any], None], words: str
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(3))
    assert_equal(early, late)
    backward(early, 3)
    change(early)
    with pytest.raises(GradientGoneError, match=re.escape(words)) as caught:
        step(early)
    assert '"during_backward": false' in str(caught.value)
    change(late)
    assert_equal(early, late)
    early.steps.settle()  # as before a checkpoint
    for optimizer in (early, late):
        train(optimizer, range(3, 5))
    assert_equal(early, late)


def test_a_norm_that_is_not_finite_needs_no_gradient() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(3))
        backward(optimizer, 3)
        change_rate(optimizer)
        step(optimizer, is_left_out=True)
        train(optimizer, range(4, 6))
    assert early.steps.early_tile_count == 3 * TILES
    assert_equal(early, late)


def read_gradient(optimizer: Any) -> torch.Tensor:
    optimizer.stage3.grad_position = {0: (0, 0, SIZES[NAMES[0]] // 3)}
    gradient, _ = optimizer.steps.values.gradient(None, False, stock_unused)
    return torch.as_tensor(gradient)


def test_gradients_that_a_script_reads_stay_on_the_drive(caplog: pytest.LogCaptureFixture) -> None:
    early, late = make(), make(early=False)
    with caplog.at_level(logging.WARNING, "memascend"):
        for number in range(4):
            for optimizer in (early, late):
                backward(optimizer, number)
            assert torch.equal(read_gradient(early), read_gradient(late))
            for optimizer in (early, late):
                step(optimizer)
    assert early.steps.early_tile_count == 0
    assert_equal(early, late)


def test_a_gradient_that_is_read_too_late_is_refused_and_the_step_is_made() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
    all_early(early)
    with pytest.raises(GradientGoneError, match="cannot read a gradient"):
        read_gradient(early)
    for optimizer in (early, late):
        step(optimizer)
        train(optimizer, range(3, 5))
    assert early.steps.early_tile_count == 3 * TILES
    assert_equal(early, late)


@pytest.mark.parametrize("watched", [True, False])
def test_another_backward_pass_cannot_be_added_once_the_first_is_used_up(watched: bool) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1 if watched else 2))
        backward(optimizer, 2)
        optimizer.stage3.micro_step_id = 1
    backward(late, 3)
    if watched:
        backward(early, 3)
        for optimizer in (early, late):
            step(optimizer)
    else:
        with pytest.raises(GradientGoneError, match="another backward pass"):
            backward(early, 3)
        for optimizer in (early, late):  # as zero_grad
            optimizer.stage3.micro_step_id = 0
            train(optimizer, range(2, 3))
    for optimizer in (early, late):
        optimizer.stage3.micro_step_id = 0
        train(optimizer, range(4, 6))
    assert (early.steps.early_tile_count == 0) == watched
    assert_equal(early, late)


def test_a_parameter_that_missed_a_watched_step_may_miss_another() -> None:
    early, late = make(), make(early=False)
    for number in range(8):
        for optimizer in (early, late):
            backward(optimizer, number, without=(NAMES[0], 1) if number in (1, 4, 5) else None)
            all_early(optimizer)
            step(optimizer)
    # Its own tiles, and the one that it shares; one of them is left anyway.
    first = SIZES[NAMES[0]] // 3
    its = -(-2 * first // 4096) - first // 4096 - 1
    assert early.steps.early_tile_count == 6 * (TILES - its)
    assert_equal(early, late)


def test_a_parameter_that_misses_a_step_for_the_first_time_is_named() -> None:
    early, late = make(), make(early=False)
    missing = (NAMES[0], 1)
    for optimizer in (early, late):
        train(optimizer, range(2))
        # What it has from a step that was watched is there.
        backward(optimizer, 2, without=missing)
        step(optimizer)
        train(optimizer, range(3, 4))
    assert_equal(early, late)
    other = (NAMES[1], 0)
    backward(early, 4, without=other)
    with pytest.raises(GradientGoneError, match=rf"parameter param.{other[0]}.0 got no gradient"):
        step(early)
    for optimizer in (early, late):
        train(optimizer, range(5, 7))
    assert_equal(early, late)


def test_a_step_without_a_backward_pass_is_refused() -> None:
    optimizer = make()
    train(optimizer, range(3))
    with pytest.raises(GradientGoneError, match="got no gradient this time"):
        step(optimizer)


def test_a_checkpoint_that_is_loaded_before_the_step_needs_another_backward_pass() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
    early.steps.begin_load()
    early.steps.mend()
    with pytest.raises(GradientGoneError, match="a checkpoint was loaded"):
        step(early)
    for optimizer in (early, late):
        train(optimizer, range(2, 4))
    assert_equal(early, late)


def test_a_backward_pass_that_an_error_has_left_may_come_again_in_another_order() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        member = optimizer.training.members[NAMES[0]][0]  # the last of a whole pass
        give(optimizer, NAMES[0], gradients(2, torch.bfloat16)[NAMES[0]][: member.numel], member)
        optimizer.steps.restart()  # as the next forward pass has it
        train(optimizer, range(2, 3))
    assert early.steps.early_tile_count == TILES
    assert_equal(early, late)


def test_second_values_that_could_not_be_written_are_made_anew_after_a_load() -> None:
    """A write of a walk that tore the step: the key stays unreadable until it is created again."""
    faults = MemoryFaults()
    early, late = make(faults=faults), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(3))
    key = early_key(f"state.{NAMES[1]}.exp_avg")
    faults.gone = errno.EROFS
    with pytest.raises(StoreError):
        early.runtime.store.write(key=key, source=torch.zeros(128), offset_bytes=0).wait()
    faults.gone = 0
    early.steps.restart()
    early.steps.current.note_change()  # the walk ends half-way, with the values of before
    early.steps.begin_load()
    early.steps.mend()
    for optimizer in (early, late):
        train(optimizer, range(3, 6))
    assert_equal(early, late)
