"""How often a device without room is asked."""

from __future__ import annotations

import pytest
import torch

from memascend.streaming.activations.back_off import BackOff
from memascend.streaming.activations.records import Act, Record
from tests.support.activation_streams import activation_stream, numbers


def test_a_full_device_is_asked_half_as_often_each_time() -> None:
    back_off = BackOff()
    asked = []
    for turn in range(32):
        if not back_off.skips():
            asked.append(turn)
            back_off.double()
    assert asked == [0, 2, 5, 10, 19]
    back_off.reset()
    assert not back_off.skips()
    back_off.double()
    assert [back_off.skips() for _ in range(2)] == [True, False]


def test_a_nearly_full_device_is_asked_seldom_until_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = activation_stream()
    start_read = stream._start_read
    asked: list[int] = []

    def start(record: Record, act: Act) -> None:
        if act is Act.START_PREFETCH:
            asked.append(record.number)
            raise torch.OutOfMemoryError("none left")
        start_read(record, act)

    monkeypatch.setattr(stream, "_start_read", start)
    for count in (6, 12):
        saved = [stream.put(numbers(seed, 100)) for seed in range(64)]
        stream.drain()
        for seed in reversed(range(64)):
            found = stream.take(saved.pop()).view(torch.float32)
            assert torch.equal(found, numbers(seed, 100))
        assert len(asked) == count
