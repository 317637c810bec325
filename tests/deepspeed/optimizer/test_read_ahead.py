"""The first tiles of a step are read while backward goes on, and not kept from whoever looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import early_optimizer as early
from tests.support.tiled_optimizer import NAMES
from tests.support.tiled_training import SIZES

pytestmark = pytest.mark.deepspeed


def reading(optimizer: Any) -> int:
    """Tiles that are being read."""
    return len(optimizer.stream._ahead._reading)


def trained() -> Any:
    optimizer = early.make(early=False)
    early.train(optimizer, range(1))
    return optimizer


def test_the_first_gradient_has_the_tiles_read() -> None:
    optimizer = early.make(early=False)
    early.backward(optimizer, 0)
    assert reading(optimizer) == 0  # no order is known yet
    early.step(optimizer)
    early.backward(optimizer, 1)
    assert reading(optimizer) == optimizer.training.tiles.shape.count


def test_who_changes_a_value_between_backward_and_step_has_it_seen() -> None:
    one, other = trained(), trained()
    early.backward(one, 1)
    for optimizer in (one, other):
        optimizer.finish_walk()
        assert reading(optimizer) == 0
        weights = torch.arange(SIZES[NAMES[0]]).float()
        optimizer.groups.set(NAMES[0], 0, weights, state=None)
    early.step(one)
    early.backward(other, 1)
    early.step(other)
    early.assert_equal(one, other)


def test_states_that_begin_anew_are_not_those_of_what_was_read_before() -> None:
    one, other = trained(), trained()
    for optimizer in (one, other):
        optimizer.finish_walk()
        for block in (block for tile in optimizer.training.tiles._idle for block in tile.states):
            block.fill_(7.0)  # where states that are not read would be
        optimizer.forget_states()
        optimizer.optimizer.state.clear()
    early.backward(one, 1)
    early.step(one)
    early.backward(other, 1)
    other.stream.drain()
    early.step(other)
    early.assert_equal(one, other)


def test_a_step_that_is_left_out_keeps_the_tiles_for_the_next() -> None:
    one, other = trained(), trained()
    early.backward(one, 1)
    early.step(one, is_left_out=True)
    assert reading(one) > 0
    for optimizer in (one, other):
        early.train(optimizer, range(2, 4))
    early.assert_equal(one, other)


def test_where_tiles_are_stepped_during_backward_none_is_read_before() -> None:
    optimizer = early.make()
    early.train(optimizer, range(4))
    early.backward(optimizer, 4)
    early.all_early(optimizer)
    assert optimizer.stream._ahead._before_walk == []
    optimizer.finish_walk()
