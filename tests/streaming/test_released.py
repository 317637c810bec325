"""Memory that the device may still compute with is bounded, and the host goes no further ahead."""

from __future__ import annotations

from memascend.streaming.released import RELEASED_COUNT_MIN, ReleasedMemory
from tests.support.streaming_fakes import FakeEvent


def let_go(memory: ReleasedMemory, *sizes: int) -> list[FakeEvent]:
    events = [FakeEvent() for _ in sizes]
    for event, nbytes in zip(events, sizes, strict=True):
        memory.wait()
        memory.note(nbytes, event)
    return events


def waiting(events: list[FakeEvent]) -> list[bool]:
    return [not event.passed for event in events]


def test_the_oldest_are_waited_for_and_no_more_than_the_limit_is_left() -> None:
    memory = ReleasedMemory(limit_bytes=50)
    events = let_go(memory, *[10] * 9)
    memory.wait()
    assert waiting(events) == [False] * 4 + [True] * 5
    assert [event.wait_count for event in events] == [1] * 4 + [0] * 5


def test_what_has_passed_by_itself_is_not_waited_for() -> None:
    memory = ReleasedMemory(limit_bytes=50)
    events = let_go(memory, *[10] * 5)
    for event in events:
        event.passed = True
    more = let_go(memory, *[10] * 5)
    memory.wait()
    assert sum(event.wait_count for event in events + more) == 0


def test_a_few_may_wait_however_large_they_are() -> None:
    memory = ReleasedMemory(limit_bytes=50)
    events = let_go(memory, *[1000] * 4)
    memory.wait()
    assert waiting(events) == [False] * (4 - RELEASED_COUNT_MIN) + [True] * RELEASED_COUNT_MIN
