"""Which comes next, and how often a device without room is asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memascend.streaming.activations.prefetch import ReadAhead
from memascend.streaming.activations.records import Record
from tests.support.activation_streams import activation_stream, numbers


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(0, 31))
def test_the_last_one_before_comes_next(known: set[int], removed: set[int], number: int) -> None:
    ahead = ReadAhead()
    for one in known:
        ahead.add(one)
    for one in removed:
        ahead.remove(one)
    assert ahead.last_before(number) == max(
        (one for one in known - removed if one < number), default=None
    )


def test_a_full_device_is_asked_half_as_often_each_time() -> None:
    ahead = ReadAhead()
    asked = []
    for turn in range(32):
        if not ahead.is_left_out():
            asked.append(turn)
            ahead.note_full()
    assert asked == [0, 2, 5, 10, 19]
    ahead.note_room()
    assert not ahead.is_left_out()
    ahead.note_full()
    assert [ahead.is_left_out() for _ in range(2)] == [True, False]


def test_a_nearly_full_device_is_asked_seldom_until_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = activation_stream()
    start_read = stream._start_read
    asked: list[int] = []

    def start(record: Record, *, is_ahead: bool) -> None:
        if is_ahead:
            asked.append(record.number)
            raise torch.OutOfMemoryError("none left")
        start_read(record, is_ahead=is_ahead)

    monkeypatch.setattr(stream, "_start_read", start)
    for count in (6, 12):
        saved = [stream.put(numbers(seed, 100)) for seed in range(64)]
        stream.settle()
        for seed in reversed(range(64)):
            found = stream.take(saved.pop()).view(torch.float32)
            assert torch.equal(found, numbers(seed, 100))
        assert len(asked) == count
