"""Ctrl-C at any line of a step, and again: all of it was made, none, or no other one is made."""

from __future__ import annotations

import functools

import pytest
import torch

from memascend.errors import TornStepError
from tests.support.ctrl_c import each_stride, interruptions
from tests.support.tiled_training import SIZES, Training, gradients

GRADIENTS = gradients(0, torch.bfloat16)


def training() -> Training:
    """Few tiles, so that a step is short; every sub-group but one has several members."""
    made = Training(torch.optim.AdamW, tile_numel=16384, tile_count=2)
    made.step(GRADIENTS, 1.0)
    return made


def masters(made: Training) -> torch.Tensor:
    return torch.cat([made.master(name) for name in SIZES])


def load(made: Training) -> None:
    for name in SIZES:
        made.stream.load_weights(name, made.members[name], lambda _, to: to.zero_())
    made.stream.drain()
    made.current.mend()


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Master weights before a step and after it."""
    made = training()
    before = masters(made)
    made.step(GRADIENTS, 1.0)
    return [before, masters(made)]


@each_stride(29)
def test_after_ctrl_c_in_a_step_it_was_made_or_not_or_a_load_is_asked_for(
    stride: int, expected: list[torch.Tensor]
) -> None:
    box: list[Training] = []
    outcomes: set[str] = set()

    def make() -> functools.partial[None]:
        box[:] = [training()]
        return functools.partial(box[0].step, GRADIENTS, 1.0)

    for places in interruptions(make, stride):
        made = box[0]
        if made.current.is_mixed:
            outcomes.add("half")
            with pytest.raises(TornStepError, match="load a checkpoint"):
                made.step(GRADIENTS, 1.0)
            load(made)
            assert not masters(made).any(), places
        else:
            made.stream.drain()
            found = masters(made)
            old, new = (torch.equal(found, value) for value in expected)
            assert old or new, places
            outcomes.add("whole" if new else "none")
        made.step(GRADIENTS, 1.0)
        for name in SIZES:
            assert torch.equal(made.parameter(name), made.master(name).bfloat16()), places
            assert made.parameters[name].numel() == 0, places
    assert outcomes == {"half", "whole", "none"}
