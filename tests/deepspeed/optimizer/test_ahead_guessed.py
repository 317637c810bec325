"""With clipping, steps that begin during backward are guesses: a wrong one changes nothing."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.deepspeed.optimizer.guess import WITHIN_COUNT
from memascend.nvme.store import MemoryFaults
from tests.deepspeed.optimizer.test_ahead_gone import (
    change_betas_in_place,
    clip,
    grow_scale,
    hook,
    set_state,
)
from tests.support.early_optimizer import (
    BF16,
    TILES,
    all_early,
    assert_equal,
    backward,
    change_rate,
    make,
    step,
    train,
)
from tests.support.tiled_optimizer import NAMES, stock_unused
from tests.support.tiled_training import gradients, moved_gradients

pytestmark = pytest.mark.deepspeed

#: `gradient_clipping`; norms are multiplied by the loss scale, 4.
LIMIT, SCALE = 1.0, 4.0
WITHIN, ABOVE = 0.5 * SCALE, 2.0 * SCALE


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)


def pair(**options: Any) -> tuple[Any, Any]:
    """An optimizer that guesses, and one that does not, after enough steps to guess the next."""
    both = make(clip_grad=LIMIT, **options), make(clip_grad=LIMIT, early=False)
    for optimizer in both:
        train(optimizer, range(WITHIN_COUNT), norm=WITHIN)
    assert both[0].steps.early_tile_count == 0
    return both


def counts(optimizer: Any) -> tuple[int, int]:
    return optimizer.runtime.guesses.right, optimizer.runtime.guesses.wrong


@pytest.mark.parametrize("norm", [WITHIN, ABOVE, LIMIT * SCALE, (LIMIT - 2e-6) * SCALE])
def test_a_guess_right_or_wrong_has_the_bits_of_steps_after_backward(norm: float) -> None:
    guessing, late = pair()
    for optimizer in (guessing, late):
        train(optimizer, range(4, 5), norm=norm)
        train(optimizer, range(5, 7), norm=WITHIN)
    is_right = norm < LIMIT * SCALE  # 1e-6 is added to the norm
    assert counts(guessing) == ((3, 0) if is_right else (0, 1))
    assert guessing.steps.early_tile_count == (3 * TILES if is_right else 0)
    assert_equal(guessing, late)


@pytest.mark.parametrize(
    "change", [change_rate, grow_scale, set_state, change_betas_in_place, clip, hook]
)
@pytest.mark.parametrize("norm", [WITHIN, ABOVE])
def test_nothing_that_changes_between_backward_and_step_is_refused(
    change: Callable[[Any], None], norm: float
) -> None:
    guessing, late = pair()
    for optimizer in (guessing, late):
        backward(optimizer, 4)
        all_early(optimizer)
        change(optimizer)
        step(optimizer, norm=norm)
        assert optimizer is late or counts(guessing) == (0, 1)
        train(optimizer, range(5, 7), norm=WITHIN)
    assert_equal(guessing, late)


def read_gradient(optimizer: Any) -> None:
    found = torch.empty(100)
    optimizer.gradient_stream.get(NAMES[0], 0, found)
    assert torch.equal(found, gradients(4, BF16)[NAMES[0]][:100].float())
    optimizer.steps.note_look()


def replace_gradient(optimizer: Any) -> None:
    value, _ = optimizer.steps.values.gradient(_Param(), False, stock_unused)
    value.fill_(0.5)
    optimizer.steps.values.put_back(stock_unused)


class _Param:
    """The parameter at the beginning of the first sub-group."""


def another_backward(optimizer: Any) -> None:
    backward(optimizer, 5, names=NAMES[:1])


@pytest.mark.parametrize("disturb", [read_gradient, replace_gradient, another_backward])
def test_gradients_are_still_there(disturb: Callable[[Any], None]) -> None:
    guessing, late = pair()
    for optimizer in (guessing, late):
        member = optimizer.training.members[NAMES[0]][0]
        optimizer.stage3.grad_position = {0: (0, member.offset, member.numel)}
        backward(optimizer, 4)
        all_early(optimizer)
        disturb(optimizer)
        step(optimizer, norm=WITHIN)
        train(optimizer, range(5, 7), norm=WITHIN)
    assert_equal(guessing, late)


def test_a_script_that_adds_to_final_gradients_in_every_step_is_not_guessed_for_ever() -> None:
    guessing, late = pair()
    for number in range(10):
        for optimizer in (guessing, late):
            backward(optimizer, number)
            all_early(optimizer)
            optimizer.stage3.micro_step_id = 1
            backward(optimizer, number + 1)
            optimizer.stage3.micro_step_id = 0
            step(optimizer, norm=WITHIN)
    assert counts(guessing) == (0, 2)
    assert_equal(guessing, late)


def test_a_parameter_without_a_gradient_is_stepped_with_the_one_before() -> None:
    guessing, late = pair()
    for optimizer in (guessing, late):
        for number in range(4, 7):
            backward(optimizer, number, without=(NAMES[0], 1))
            all_early(optimizer)
            step(optimizer, norm=WITHIN)
    assert 0 < guessing.steps.early_tile_count < 3 * TILES
    assert_equal(guessing, late)


def test_a_step_that_is_left_out_is_no_guess() -> None:
    guessing, late = pair()
    for optimizer in (guessing, late):
        train(optimizer, range(4, 5), is_left_out=True)
        train(optimizer, range(5, 6), norm=WITHIN)
    assert counts(guessing) == (1, 0)
    assert_equal(guessing, late)


def test_a_drive_that_fails_in_an_early_tile_makes_a_wrong_guess() -> None:
    faults = MemoryFaults()
    guessing, late = pair(faults=faults)
    for optimizer in (guessing, late):
        backward(optimizer, 4, names=NAMES[1:])
    all_early(guessing)
    guessing.steps._ahead._tiles._fail(OSError(errno.EIO, "the drive failed"))
    for optimizer in (guessing, late):
        backward(optimizer, 4, names=NAMES[:1])
        step(optimizer, norm=WITHIN)
        train(optimizer, range(5, 7), norm=WITHIN)
    assert counts(guessing) == (2, 1)
    assert_equal(guessing, late)


def test_every_gradient_goes_to_the_drive_and_few_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guessing, late = pair()
    moved, moved_late = [], list[str]()
    for optimizer, keys in ((guessing, moved), (late, moved_late)):
        optimizer.steps.finish()
        found = moved_gradients(optimizer.training, monkeypatch)
        train(optimizer, range(4, 5), norm=WITHIN)
        optimizer.steps.finish()
        keys += found
    members = [(name, one) for name in NAMES for one in guessing.training.members[name]]
    assert {key.rsplit(".", 1)[0] for key in moved} == {
        f"gradient.{name}.{member.offset}" for name, member in members
    }
    assert len(moved) < len(moved_late), "tiles that were stepped early read none"


def test_a_wrong_guess_is_told_to_those_who_look_closely_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guessing, _ = pair()
    with caplog.at_level(logging.INFO, "memascend"):
        train(guessing, range(4, 5), norm=ABOVE)
    assert caplog.text == ""
    train(guessing, range(5, 9), norm=WITHIN)
    with caplog.at_level(logging.DEBUG, "memascend"):
        train(guessing, range(9, 10), norm=ABOVE)
    assert "above gradient_clipping" in caplog.text


def test_in_a_step_that_is_not_guessed_tiles_read_ahead_follow_a_change() -> None:
    both = make(clip_grad=LIMIT), make(clip_grad=LIMIT, early=False)
    for optimizer in both:
        train(optimizer, range(2), norm=WITHIN)
        backward(optimizer, 2)
        optimizer.steps.values._finish_sub_group = lambda name: None  # ends no reads
        set_state(optimizer)
        step(optimizer, norm=WITHIN)
    assert counts(both[0]) == (0, 0)
    assert_equal(*both)
