"""Steps that begin during backward: what is early, what is forgotten, and what a run is told."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from packaging.version import Version

from memascend.deepspeed.optimizer.ahead import AfterBackward
from memascend.errors import GradientGoneError, StoreFullError
from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.sub_group_step import early_key
from tests.support.early_optimizer import (
    BF16,
    LEFT_TILES,
    TILES,
    all_early,
    assert_equal,
    backward,
    change_rate,
    make,
    step,
    stepped_whole,
    train,
    values,
)
from tests.support.tiled_optimizer import NAMES
from tests.support.tiled_training import gradients, moved_gradients

pytestmark = pytest.mark.deepspeed


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)


def test_a_scale_that_grows_in_a_step_is_known_before() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        optimizer.stage3.loss_scaler = DynamicLossScaler(
            init_scale=4.0,
            scale_window=2,
            min_scale=1.0,
            delayed_shift=1,
            consecutive_hysteresis=False,
            dtype=torch.float16,
        )
        train(optimizer, range(7))
        assert optimizer.stage3.loss_scale > 16.0
    assert early.steps.early_tile_count == 5 * TILES
    assert_equal(early, late)


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_two_steps_are_watched_and_all_others_are_early(state_dtype: torch.dtype) -> None:
    early, late = make(state_dtype=state_dtype), make(early=False, state_dtype=state_dtype)
    for optimizer in (early, late):
        train(optimizer, range(5))
    assert early.steps.early_tile_count == 3 * TILES
    assert late.steps.early_tile_count == 0
    assert_equal(early, late)


@pytest.mark.parametrize("is_early", [False, True])
def test_sub_groups_have_the_powers_of_their_own_calls_in_older_releases(is_early: bool) -> None:
    """Also behind the caller in another order, without a gradient, and after a step left out."""
    optimizer = make(early=is_early, is_older=True, betas=(0.9, 0.999))
    backward(optimizer, 0, names=[NAMES[0], NAMES[2]])
    step(optimizer)
    train(optimizer, range(1, 5))
    train(optimizer, range(5, 6), is_left_out=True)
    train(optimizer, range(6, 16))
    optimizer.steps.finish()
    assert optimizer.steps.current.order != NAMES
    assert (optimizer.steps.early_tile_count > 0) == is_early
    given = [gradients(number, BF16) for number in range(16) if number != 5]
    del given[0][NAMES[1]]
    masters = [optimizer.training.master(name) for name in NAMES]
    older, newer = (stepped_whole(optimizer, given, is_older=older) for older in (True, False))
    assert all(map(torch.equal, masters, older))
    if Version(deepspeed.__version__) >= Version("0.19.0"):  # else both are the older ones
        assert not any(map(torch.equal, masters, newer))


def test_an_early_step_moves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make()
    moved = moved_gradients(optimizer.training, monkeypatch)
    train(optimizer, range(2))
    optimizer.steps.finish()
    of_left = {
        f"gradient.{name}.{member.offset}.0"
        for name, begin in LEFT_TILES.items()
        for member in optimizer.training.members[name]
        if begin < member.offset + member.numel
    }
    assert set(moved) > of_left
    moved.clear()
    train(optimizer, range(2, 4))
    optimizer.steps.finish()
    assert set(moved) == of_left


def test_a_step_that_is_over_first_leaves_no_tile_to_the_next_forward_pass() -> None:
    early, late = make(overlap=False), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(4))
    assert early.steps.early_tile_count == 2 * (TILES + len(LEFT_TILES))
    assert_equal(early, late)


def test_whatever_torch_makes_by_default_a_step_is_counted() -> None:
    early, late = make(), make(early=False)
    torch.set_default_dtype(BF16)
    try:
        for optimizer in (early, late):
            train(optimizer, range(3))
            optimizer.steps.finish()
    finally:
        torch.set_default_dtype(torch.float32)
    assert early.steps.early_tile_count == TILES
    assert_equal(early, late)


def test_a_write_that_failed_early_is_not_read_by_later_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = MemoryFaults()
    early, late = make(faults=faults), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
    early.steps.finish()  # the tiles that were left are not to count
    staging = early.runtime.staging
    write_back, submit, calls = early.stream._write_back, staging.submit, itertools.count()
    alone = threading.Lock()  # gradients that go to the drive meanwhile must not meet the fault

    def fail(tile: Any, *arguments: Any, **keywords: Any) -> None:
        with alone:
            faults.gone = errno.ENODEV if next(calls) == 1 else 0
            try:
                write_back(tile, *arguments, **keywords)
                tile.wait()
            finally:
                faults.gone = 0

    def submit_alone(*arguments: Any) -> None:
        with alone:
            submit(*arguments)
            staging.wait_writes()

    with monkeypatch.context() as patch:
        patch.setattr(early.stream, "_write_back", fail)
        patch.setattr(staging, "submit", submit_alone)
        backward(early, 2)
        all_early(early)
    with pytest.raises(GradientGoneError, match="could not be stepped during backward"):
        step(early)
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(2, 6))
    assert early.steps.early_tile_count == 4 * TILES
    assert_equal(early, late)


def test_without_a_thread_the_step_comes_after_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)

    def refuse(function: Any) -> None:
        raise RuntimeError("can't start new thread")

    for optimizer in (early, late):
        train(optimizer, range(2))
        with monkeypatch.context() as patch:
            if optimizer is early:
                patch.setattr(early.runtime.background, "run", refuse)
            backward(optimizer, 2)
            with caplog.at_level(logging.WARNING, "memascend"):
                step(optimizer)
        train(optimizer, range(3, 4))
    assert "can't start new thread" in caplog.text
    assert early.steps.early_tile_count == TILES
    assert_equal(early, late)


def test_values_may_be_looked_at_in_the_middle_of_backward() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        note_final, seen = optimizer.steps.note_final, []

        def look(
            name: str, offset: int, optimizer: Any = optimizer, note: Any = note_final
        ) -> None:
            note(name, offset)
            if not seen:  # noqa: B023  of this turn
                seen.append(values(optimizer))  # noqa: B023

        optimizer.steps.note_final = look
        backward(optimizer, 2)
        optimizer.steps.note_final = note_final
        step(optimizer)
    assert_equal(early, late)


def test_who_looks_at_values_before_the_step_sees_those_before() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
    all_early(early)
    assert_equal(early, late)
    for optimizer in (early, late):
        optimizer.steps.settle()
        step(optimizer)
    assert early.steps.early_tile_count == TILES
    assert_equal(early, late)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        train(optimizer, range(2, 3), is_left_out=True)
    assert_equal(early, late)
    for optimizer in (early, late):
        train(optimizer, range(3, 6))
    assert early.steps.early_tile_count == 3 * TILES
    assert_equal(early, late)


def test_a_second_backward_pass_counts_and_the_first_does_not() -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
        backward(optimizer, 2)
        change_rate(optimizer)  # as after zero_grad
        train(optimizer, range(3, 5))
    assert early.steps.early_tile_count == 2 * TILES
    assert_equal(early, late)


def test_where_the_first_tile_fails_early_none_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(2))
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise OSError("the drive is gone")

        patch.setattr(early.stream, "step_early", fail)
        backward(early, 2)
        all_early(early)
    with caplog.at_level(logging.WARNING, "memascend"):
        step(early)
    assert "the drive is gone" in caplog.text
    train(late, range(2, 3))
    for optimizer in (early, late):
        train(optimizer, range(3, 4))
    assert early.steps.early_tile_count == TILES
    assert_equal(early, late)


def test_without_room_for_second_values_nothing_is_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    early, late = make(), make(early=False)
    for optimizer in (early, late):
        train(optimizer, range(1))
    reserve = early.runtime.store.reserve

    def refuse(*, key: str, nbytes: int) -> None:
        if key == early_key(f"state.{NAMES[1]}.exp_avg"):
            raise StoreFullError(28, "no room")
        reserve(key=key, nbytes=nbytes)

    monkeypatch.setattr(early.runtime.store, "reserve", refuse)
    with caplog.at_level(logging.WARNING, "memascend"):
        for optimizer in (early, late):
            train(optimizer, range(1, 5))
    assert caplog.text.count("streaming.optimizer.during_backward") == 1
    assert early.steps.early_tile_count == 0
    assert not [key for key in early.runtime.store.keys() if key.startswith(early_key(""))]  # noqa: SIM118
    assert_equal(early, late)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fused": False}, "fused"),
        ({"streams_gradients": False}, "not streamed"),
    ],
)
def test_where_it_cannot_be_the_run_is_told(
    changes: dict[str, Any],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "memascend"):
        optimizer = make(**changes)
    assert "streaming.optimizer.during_backward" in caplog.text
    assert words in caplog.text
    assert isinstance(optimizer.steps._ahead, AfterBackward)


def test_second_values_go_with_the_optimizer() -> None:
    optimizer = make()
    train(optimizer, range(3))
    optimizer.steps.finish()
    store = optimizer.runtime.store
    assert [key for key in store.keys() if key.startswith(early_key(""))]  # noqa: SIM118
    optimizer.steps.discard(None)
    assert not [key for key in store.keys() if key.startswith(early_key(""))]  # noqa: SIM118


def test_a_step_without_early_tiles_does_not_make_keys_readable_that_a_write_has_failed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = make()
    train(optimizer, range(2))
    ahead = optimizer.steps._ahead
    ahead._tiles.has_failed = True
    with monkeypatch.context() as patch:
        patch.setattr(ahead, "_may_be_early", lambda number: False)
        train(optimizer, range(2, 3))
    assert ahead._tiles.has_failed
    train(optimizer, range(3, 4))
    assert not ahead._tiles.has_failed
