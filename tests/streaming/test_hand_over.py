"""Slots that the walk fills: how much of each is new, and when none is touched any more."""

from __future__ import annotations

import pytest
import torch

from memascend.streaming.hand_over import HandOver

NUMEL = 10


@pytest.fixture
def slot() -> torch.Tensor:
    return torch.zeros(NUMEL)


def fill(hand_over: HandOver, begin: int, end: int, value: float = 1.0) -> None:
    hand_over.fill("a", begin, torch.full((end - begin,), value))


@pytest.mark.parametrize(
    ("ranges", "missing"),
    [
        ([(0, 4), (4, 10)], 0),
        ([(4, 8), (8, 10)], 4),
        ([(0, 4), (6, 8), (8, 10)], 6),
        ([(0, 4), (4, 8)], 10),
        ([], 10),
    ],
)
def test_leading_elements_that_the_walk_had_passed_are_missing(
    slot: torch.Tensor, ranges: list[tuple[int, int]], missing: int
) -> None:
    hand_over = HandOver()
    hand_over.offer("a", slot)
    for begin, end in ranges:
        fill(hand_over, begin, end)
    assert hand_over.take("a", NUMEL) == missing
    assert torch.equal(slot[missing:], torch.ones(NUMEL - missing))


def test_a_slot_that_was_taken_is_not_filled(slot: torch.Tensor) -> None:
    hand_over = HandOver()
    hand_over.offer("a", slot)
    fill(hand_over, 0, 4)
    hand_over.take("a", NUMEL)
    fill(hand_over, 4, NUMEL, 2.0)
    assert not slot[4:].any()
    assert hand_over.take("a", NUMEL) == NUMEL


def test_what_an_earlier_walk_left_does_not_count(slot: torch.Tensor) -> None:
    hand_over = HandOver()
    hand_over.offer("a", slot)
    fill(hand_over, 0, NUMEL)
    hand_over.offer("a", slot)
    assert hand_over.take("a", NUMEL) == NUMEL


def test_a_slot_offered_in_inference_mode_is_filled_by_a_thread_outside_of_it() -> None:
    """As in an evaluation behind a step: the mode is that of the thread that stages shards."""
    hand_over, memory = HandOver(), torch.zeros(4 * NUMEL, dtype=torch.uint8)
    with torch.inference_mode():
        slot = memory.view(torch.float32)
    assert slot.is_inference()
    hand_over.offer("a", slot)
    fill(hand_over, 0, NUMEL)
    assert hand_over.take("a", NUMEL) == 0
    assert torch.equal(memory.view(torch.float32), torch.ones(NUMEL))


def test_a_handler_may_let_a_shard_go_while_its_thread_offers_another(slot: torch.Tensor) -> None:
    hand_over = HandOver()
    with hand_over._lock:  # where a signal's handler runs
        assert hand_over.take("b", NUMEL) == NUMEL
        hand_over.offer("a", slot)
    fill(hand_over, 0, NUMEL)
    assert hand_over.take("a", NUMEL) == 0
