"""Ctrl-C at any line of a call on states in codes, and the call again: its result is right."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.streaming.optimizer.test_codes import MOMENTS, run, streamed, training
from tests.support.ctrl_c import each_stride, interruptions
from tests.support.tiled_training import SIZES, Training

#: As few as may be, and so large that a sub-group is a few chunks.
SLOTS = {"slot_count": 2, "slot_bytes": 64 << 10}
VALUE = torch.rand(9000, generator=torch.Generator().manual_seed(2)) * 1e-3


def stepped() -> Training:
    return run(training(tile_numel=16384, tile_count=2, slots=SLOTS), 0, 1)


def moments(made: Training) -> torch.Tensor:
    return torch.cat([made.master(name, state) for name in SIZES for state in MOMENTS])


def read(made: Training) -> None:
    made.master("0_3", "exp_avg_sq")


def stream(made: Training) -> None:
    streamed(made, "0_3", "exp_avg")


def put(made: Training) -> None:
    made.groups.set("0_3", 77, VALUE, state="exp_avg")


@functools.cache
def saved() -> dict[tuple[str, str], torch.Tensor]:
    """Other values of every state."""
    other = run(training(), 5, 6)
    return {(name, state): streamed(other, name, state) for name in SIZES for state in MOMENTS}


def replace(made: Training) -> None:
    made.slots.wait_writes()  # as a load does: of keys that are about to go
    made.groups.discard_states()
    for (name, state), value in saved().items():
        made.load(name, state, value)


@each_stride(31)
@pytest.mark.parametrize("call", [read, stream, put, replace])
def test_a_call_that_ctrl_c_ended_is_right_when_it_is_made_again(
    call: Callable[[Training], None], stride: int
) -> None:
    reference = stepped()
    call(reference)
    expected = moments(reference)
    box: list[Training] = []

    def make() -> functools.partial[None]:
        box[:] = [stepped()]
        return functools.partial(call, box[0])

    for places in interruptions(make, stride):
        call(box[0])
        found = moments(box[0])
        if call is put:  # values beside the range were rounded by its scale twice
            begin, end = 128, 128 + 8832
            inside = found[begin:end]
            assert torch.equal(inside, expected[begin:end]), places
        else:
            assert torch.equal(found, expected), places
