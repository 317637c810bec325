"""Ctrl-C at any line of saving and taking, and again: nothing is left over, and nobody hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from memascend.streaming.activations.records import Activation
from memascend.streaming.activations.stream import ActivationStream
from tests.support.activation_streams import WAIT_S, activation_stream, keys, numbers
from tests.support.ctrl_c import each_stride, interruptions

COUNT = 4


class Work:
    """A forward and a backward pass, as far as the stream is concerned."""

    def __init__(self, stream: ActivationStream) -> None:
        self.stream = stream
        self.saved: list[Activation] = []

    def forward(self) -> None:
        for seed in range(COUNT):
            self.saved.append(self.stream.put(numbers(seed)))

    def backward(self) -> None:
        for seed in reversed(range(len(self.saved))):
            found = self.stream.take(self.saved[seed]).view(torch.float32)
            assert torch.equal(found, numbers(seed))
            self.stream.release(self.saved[seed])
            del found, self.saved[seed]

    def all_of_it(self) -> None:
        self.forward()
        self.backward()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # no object yet
@each_stride(7)
def test_ctrl_c_leaves_nothing_behind_and_the_rest_can_still_be_taken(stride: int) -> None:
    stream = activation_stream()
    works: list[Work] = []

    def make() -> Callable[[], None]:
        works[:] = [Work(stream)]
        return works[0].all_of_it

    count = 0
    for where in interruptions(make, stride):
        count += 1
        work = works.pop()
        after = threading.Thread(target=work.backward, daemon=True)
        after.start()
        after.join(WAIT_S)
        assert not after.is_alive(), where
        assert work.saved == [], where
        del after, work
        assert (keys(stream), stream.count) == ([], 0), where
        assert (stream._saved.held_bytes, stream._saved.ahead_bytes) == (0, 0), where
    assert count > 50 * COUNT // stride
