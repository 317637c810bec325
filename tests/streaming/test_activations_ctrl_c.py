"""Ctrl-C at any line of saving and taking: nothing stays that nobody has, and nobody hangs."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from memascend.streaming.activation_records import Activation
from memascend.streaming.activations import ActivationStream
from tests.support.activation_streams import WAIT_S, activation_stream, keys, numbers
from tests.support.ctrl_c import interrupted

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
def test_ctrl_c_leaves_nothing_behind_and_the_rest_can_still_be_taken() -> None:
    stream = activation_stream()
    for at_line in itertools.count():
        work = Work(stream)
        where = interrupted(at_line, work.all_of_it)
        after = threading.Thread(target=work.backward, daemon=True)
        after.start()
        after.join(WAIT_S)
        assert not after.is_alive(), where
        assert work.saved == [], where
        del after, work
        assert (keys(stream), stream.count) == ([], 0), where
        assert (stream._held_bytes, stream._ahead_bytes) == (0, 0), where
        if where is None:
            break
    assert at_line > 50 * COUNT
