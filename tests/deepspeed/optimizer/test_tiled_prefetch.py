"""The first tiles of a step are read while backward goes on, and what is changed then is seen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import early_optimizer as early
from tests.support.tiled_optimizer import NAMES, stock_unused
from tests.support.tiled_training import gradients

pytestmark = pytest.mark.deepspeed

PLACE = (0, 100, 6)  # a sub-group, and elements of it


def reading(optimizer: Any) -> int:
    """Tiles that are being read."""
    return len(optimizer.stream._prefetch._reading)


def trained() -> Any:
    optimizer = early.make(early=False)
    early.train(optimizer, range(1))
    return optimizer


def give_one(optimizer: Any, number: int) -> None:
    """The first gradient that a backward pass gives."""
    name = NAMES[-1]
    member = optimizer.training.members[name][-1]
    value = gradients(number, early.BF16)[name][member.offset : member.offset + member.numel]
    early.give(optimizer, name, value, member)


def test_the_first_gradient_has_the_tiles_read() -> None:
    optimizer = early.make(early=False)
    give_one(optimizer, 0)
    assert reading(optimizer) == 0  # no order is known yet
    early.backward(optimizer, 0)
    early.step(optimizer)
    give_one(optimizer, 1)
    assert reading(optimizer) == optimizer.training.tiles.shape.count


def test_after_half_a_step_nothing_is_read() -> None:
    optimizer = trained()
    optimizer.steps.finish()
    optimizer.steps.current.note_load()
    give_one(optimizer, 1)
    assert reading(optimizer) == 0


def test_a_value_set_between_backward_and_step_is_seen() -> None:
    one, other = trained(), trained()
    other.steps.finish()  # which reads tiles of its own
    early.backward(one, 1)
    for optimizer in (one, other):
        optimizer.stage3.grad_position = {0: PLACE}
        value, _ = optimizer.steps.values.state(None, False, None, stock_unused)
        assert reading(optimizer) == (3 if optimizer is one else 0)  # looking drops nothing
        value.fill_(7.0)
        optimizer.steps.values.put_back(stock_unused)
        assert reading(optimizer) == 0
    early.step(one)
    early.backward(other, 1)
    early.step(other)
    early.assert_equal(one, other)
    assert one.training.master(NAMES[0])[PLACE[1]] > 6


def test_states_that_begin_anew_are_not_those_of_what_was_read_before() -> None:
    one, other = trained(), trained()
    for optimizer in (one, other):
        optimizer.steps.finish()
        tiles = optimizer.training.tiles
        taken = [tiles.take("", 0, 1) for _ in range(tiles.shape.count)]
        for tile in taken:
            for block in tile.states:
                block.fill_(7.0)  # where states that are not read would be
            tiles.retire(tile)
        optimizer.steps.discard_states()
        optimizer.base.state.clear()
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
    assert optimizer.stream._prefetch._before_walk == []
    optimizer.steps.finish()


def test_a_walk_that_ended_as_it_began_leaves_no_tile_to_early_steps() -> None:
    """As Ctrl-C may leave it, between the beginning of a walk and the thread that goes on."""
    one, other = early.make(), early.make()
    for optimizer in (one, other):
        early.train(optimizer, range(3))
    early.backward(one, 3)
    early.all_early(one)
    one.steps.prepare(0, stock_unused)
    one.steps.restart()
    before = one.steps.early_tile_count
    for optimizer in (one, other):
        early.train(optimizer, range(4, 6))
    assert one.steps.early_tile_count == before + 2 * early.TILES
    early.assert_equal(one, other)


def test_a_dying_engine_destroys_once_more_and_has_nothing_to_wait_for() -> None:
    optimizer = trained()
    early.backward(optimizer, 1)
    optimizer.steps.discard(None)
    optimizer.steps.finish()
