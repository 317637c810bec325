"""Tiles that are stepped early: which, when, and that forgetting them changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memascend.base.waiting import Ended
from memascend.errors import StoreError
from memascend.streaming.optimizer.during_backward import leave_some
from tests.support.early_training import NAMES, Counted, Early
from tests.support.tiled_training import SIZES, lose_drive_at, moved_gradients

TILE_NUMEL = 4096
SPARE_COUNT = 3


@pytest.fixture
def made() -> Iterator[Callable[..., Early]]:
    every: list[Early] = []

    def make(spare_count: int = SPARE_COUNT) -> Early:
        every.append(Early(spare_count))
        return every[-1]

    yield make
    for one in every:
        one.may_step.set()
        one.executor.shutdown()


def assert_equal(one: Early, other: Early) -> None:
    pairs = zip(one.values(), other.values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_every_third_tile_is_left_to_the_step(made: Callable[..., Early]) -> None:
    early, late = made(), made()
    chosen = leave_some([early.part(name) for name in NAMES], 3)  # of 5 tiles, 2, and 1
    left_tiles = [tile for part in chosen for tile in part.left_tiles()]
    assert left_tiles == [(NAMES[0], 2 * TILE_NUMEL), (NAMES[1], 0)]
    early.early.expect(chosen)
    for one in (early, late):
        one.put(0, *reversed(NAMES))
    early.all_stepped()
    fused = Counted()
    early.finish(fused)
    late.finish(Counted())
    assert sum(fused.elements) == 2 * TILE_NUMEL
    assert_equal(early, late)


@pytest.mark.parametrize("count", range(len(NAMES) + 1))
def test_early_or_not_the_values_are_equal(made: Callable[..., Early], count: int) -> None:
    early, late = made(), made()
    for number in range(3):
        early.begin()
        early.put(number, *reversed(NAMES[:count]))
        early.all_stepped()
        early.early.close()
        early.put(number, *NAMES[count:])
        late.put(number, *NAMES)
        fused = Counted()
        early.finish(fused)
        late.finish(Counted())
        # A sub-group whose tiles were all early is counted, once, without any element.
        stepped = sum(SIZES[name] for name in NAMES[count:])
        assert sum(fused.elements) == stepped
        assert_equal(early, late)


def test_a_part_of_a_sub_group_is_early_and_the_step_makes_the_rest(
    made: Callable[..., Early],
) -> None:
    early, late = made(), made()
    early.begin()
    # Two tiles of the first sub-group are stepped, and the third finds that this is over.
    stepped = threading.Semaphore(0)
    step_early = early.stream.step_early

    def count(*arguments: Any) -> tuple[str, int]:
        found = step_early(*arguments)
        if found == (NAMES[0], TILE_NUMEL):
            early.early._is_open = False
        stepped.release()
        return found

    early.stream.step_early = count  # type: ignore[method-assign]
    early.put(0, *NAMES)
    assert stepped.acquire(timeout=30)
    assert stepped.acquire(timeout=30)
    fused = Counted()
    early.finish(fused)
    late.put(0, *NAMES)
    late.finish(Counted())
    assert sum(fused.elements) == sum(SIZES.values()) - 2 * TILE_NUMEL
    assert_equal(early, late)


def test_an_early_value_is_given_to_nobody_while_it_may_be_forgotten(
    made: Callable[..., Early], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = made()
    monkeypatch.setattr(early.stream._hand_over, "fill", pytest.fail)
    early.begin()
    early.put(0, *NAMES)
    early.all_stepped()
    early.finish(Counted())


def test_a_gradient_of_an_early_tile_touches_no_drive(
    made: Callable[..., Early], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = made()
    moved = moved_gradients(early.training, monkeypatch)
    early.begin()
    early.put(0, *NAMES)
    early.all_stepped()
    early.finish(Counted())
    assert moved == []
    early.put(1, *NAMES)
    early.finish(Counted())
    assert len(moved) >= 2 * len(NAMES)


def test_what_is_complete_when_backward_ends_is_still_stepped_early(
    made: Callable[..., Early], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = made(), made()
    moved = moved_gradients(early.training, monkeypatch)
    name = NAMES[-1]
    early.early.expect([early.part(name)])
    early.may_step.clear()
    early.put(0, name)
    threading.Timer(0.05, early.may_step.set).start()
    early.early.finish()
    assert early.early._done[name] == set(early.training.groups.begins(name))
    early.finish(Counted())
    assert moved == []
    late.put(0, name)
    late.finish(Counted())
    assert_equal(early, late)


def test_what_is_forgotten_was_never_there(made: Callable[..., Early]) -> None:
    early, late = made(), made()
    before = early.values()
    early.begin()
    early.put(0, *NAMES)
    early.early.drop()
    assert all(torch.equal(a, b) for a, b in zip(before, early.values(), strict=True))
    for one in (early, late):
        one.put(1, *NAMES)
        one.finish(Counted())
    assert_equal(early, late)


def test_ctrl_c_in_the_wait_for_a_copy_loses_no_block(made: Callable[..., Early]) -> None:
    early = made()
    ranges = [(0, 5000), (5000, SIZES[NAMES[0]] - 5000)]
    early.early.expect([early.part(NAMES[0], ranges=ranges)])
    early.put_part(0, NAMES[0], *ranges[0])
    early.all_stepped()
    [waiting] = early.early._waiting.values()
    copy = Ended(KeyboardInterrupt())  # type: ignore[arg-type]
    waiting.copies.add(copy, copy)
    with pytest.raises(KeyboardInterrupt):
        early.early.drop()
    early.early.drop()
    assert None not in [early.training.tiles.acquire_spare() for _ in range(SPARE_COUNT)]


def test_a_gradient_that_comes_twice_makes_nothing_early(made: Callable[..., Early]) -> None:
    early, late = made(), made()
    early.begin()
    early.put(0, NAMES[0])
    early.put(1, *NAMES)
    early.early.close()
    assert early.early._done == {}
    assert list(early.training.gradient_stream.bypassed(NAMES[0])) == []
    late.put(1, *NAMES)
    for one in (early, late):
        one.finish(Counted())
    assert_equal(early, late)


def test_a_tile_waits_for_the_last_of_its_gradients(made: Callable[..., Early]) -> None:
    early = made()
    name = NAMES[0]
    ranges = [(0, 5000), (5000, 7000), (12_000, SIZES[name] - 12_000)]
    early.early.expect([early.part(name, ranges=ranges)])
    found = []
    for offset, numel in (ranges[2], ranges[0], ranges[1]):
        early.put_part(0, name, offset, numel)
        early.all_stepped()
        found.append(set(early.early._done.get(name, ())))
    later = {12_288, 16_384}
    assert found == [later, later | {0}, {0, 4096, 8192} | later]


def test_what_waits_in_vain_is_brought_back(made: Callable[..., Early]) -> None:
    early, late = made(), made()
    name, cut = NAMES[0], 5000
    ranges = [(0, cut), (cut, SIZES[name] - cut)]
    for one in (early, late):  # what the second of them has from the step before
        for offset, numel in ranges:
            one.put_part(0, name, offset, numel)
        one.finish(Counted())
    early.early.expect([early.part(name, ranges=ranges)])
    for one in (early, late):
        one.put_part(1, name, *ranges[0])
        one.all_stepped()
    assert {begin // TILE_NUMEL for _, begin in early.training.gradient_stream.bypassed(name)} == {
        0,
        1,
    }
    fused = Counted()
    early.finish(fused)
    late.finish(Counted())
    assert {begin // TILE_NUMEL for _, begin in early.training.gradient_stream.bypassed(name)} == {
        0
    }
    assert sum(fused.elements) == sum(SIZES.values()) - TILE_NUMEL
    assert_equal(early, late)


def test_a_gradient_that_is_to_be_kept_is_and_its_tiles_are_late(
    made: Callable[..., Early],
) -> None:
    early, late = made(), made()
    name, cut = NAMES[0], 5000
    ranges = [(0, cut), (cut, SIZES[name] - cut)]
    early.early.expect([early.part(name, ranges=ranges[1:], kept=ranges[:1])])
    for one in (early, late):
        for part in ranges:
            one.put_part(0, name, *part)
        one.all_stepped()
    assert {begin // TILE_NUMEL for _, begin in early.training.gradient_stream.bypassed(name)} == {
        2,
        3,
        4,
    }
    for one in (early, late):
        one.finish(Counted())
    assert_equal(early, late)


def test_where_no_gradient_can_come_is_zero(made: Callable[..., Early]) -> None:
    early, late = made(), made()
    name, numel = NAMES[0], 5000
    for number in range(2):  # the blocks are not new in the second
        early.early.expect([early.part(name, ranges=[(0, numel)])])
        for one in (early, late):
            one.put_part(number, name, 0, numel)
            one.all_stepped()
        assert early.early._done == {name: {0, TILE_NUMEL}}
        for one in (early, late):
            one.finish(Counted())
        assert_equal(early, late)


def test_backward_waits_where_all_blocks_are_of_tiles_that_are_stepped(
    made: Callable[..., Early],
) -> None:
    early = made(1)
    early.begin()
    early.put(0, *NAMES)
    early.all_stepped()
    assert {name: len(begins) for name, begins in early.early._done.items()} == {
        name: len(early.training.groups.begins(name)) for name in NAMES
    }


def test_without_a_block_a_tile_is_late(made: Callable[..., Early]) -> None:
    early, late = made(1), made(1)
    name, cut = NAMES[0], 5000
    ranges = [(0, cut), (cut, SIZES[name] - cut)]
    early.early.expect([early.part(name, ranges=ranges), early.part(NAMES[1])])
    for one in (early, late):
        one.put_part(0, name, *ranges[0])  # its second tile waits for the other
        one.put(0, NAMES[1])
        one.put_part(0, name, *ranges[1])
        one.all_stepped()
    late_begins = set(early.training.groups.begins(NAMES[1]))
    assert early.early._expected.left == {(NAMES[1], begin) for begin in late_begins}
    assert early.early._done == {name: set(early.training.groups.begins(name))}
    for one in (early, late):
        one.finish(Counted())
    assert_equal(early, late)


def test_an_error_makes_nothing_early_and_is_told(
    made: Callable[..., Early], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = made()
    before = early.values()
    lose_drive_at(3, early.stream, monkeypatch)
    early.begin()
    early.put(0, *NAMES)
    early.all_stepped()
    early.early.close()
    brought: list[tuple[str, int]] = []
    begins, error = early.early.take_results(
        lambda name, _, begin, part: brought.append((name, begin))
    )
    assert begins == {}
    assert isinstance(error, StoreError)
    assert brought == sorted(brought)
    assert (NAMES[0], 0) not in brought  # it was stepped
    assert early.early.take_results(early.training.gradient_stream.put_back) == ({}, None)
    assert all(torch.equal(a, b) for a, b in zip(before, early.values(), strict=True))


def test_sub_groups_of_nobody_are_left_alone(made: Callable[..., Early]) -> None:
    early = made()
    early.early.expect([])
    early.put(0, *NAMES)
    assert early.early.take_results(early.training.gradient_stream.put_back) == ({}, None)
