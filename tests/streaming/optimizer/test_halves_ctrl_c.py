"""Ctrl-C at any line of a change of master weights in halves, and again: no weight is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.sub_group import MasterForm
from tests.streaming.optimizer.test_halves import idle_step, set_ties, steps, training
from tests.support.ctrl_c import each_stride, interruptions
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import SIZES, Training

#: As few as may be, and so large that a sub-group is a few chunks.
SLOTS = {"slot_count": 2, "slot_bytes": 128 << 10}


def stepped(**options: Any) -> Training:
    """Weights with every kind of half: low ones, and flags."""
    made = training(split=True, tile_numel=16384, tile_count=2, slots=SLOTS, **options)
    steps(0)(made)
    set_ties(made)
    idle_step(made)
    return made


def masters(made: Training) -> torch.Tensor:
    return torch.cat([made.master(name) for name in SIZES])


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """Master weights before the first step, and after the last."""
    return [masters(training(split=True)), masters(stepped())]


def keep_high(made: Training) -> None:
    made.groups.keep_high("0_3", "4_4")


def drop_states(made: Training) -> None:
    made.groups.discard_states()


def make_whole(made: Training) -> None:
    for name in SIZES:
        made.groups.make_whole(name)


@each_stride(23)
@pytest.mark.parametrize("is_stepped", [True, False])
@pytest.mark.parametrize("change", [keep_high, drop_states, make_whole])
def test_ctrl_c_in_a_change_of_form_leaves_every_master_weight(
    change: Callable[[Training], None],
    is_stepped: bool,
    stride: int,
    expected: list[torch.Tensor],
) -> None:
    box: list[Training] = []

    def make() -> functools.partial[None]:
        fresh = functools.partial(training, split=True, slots=SLOTS)
        box[:] = [stepped() if is_stepped else fresh()]
        return functools.partial(change, box[0])

    for places in interruptions(make, stride):
        made = box[0]
        assert torch.equal(masters(made), expected[is_stepped]), places
        change(made)
        assert torch.equal(masters(made), expected[is_stepped]), places


@each_stride(23)
@pytest.mark.parametrize("is_split", [True, False])
def test_a_load_that_ctrl_c_ended_is_right_when_it_is_made_again(
    is_split: bool, stride: int
) -> None:
    box: list[Training] = []

    def load() -> None:
        (made,) = box
        made.groups.begin_load()
        for name, weights in made.initial.items():
            made.load(name, None, -weights)
        made.stream.drain()

    def make() -> Callable[[], None]:
        box[:] = [training(split=is_split, tile_numel=16384, tile_count=2, slots=SLOTS)]
        return load

    for places in interruptions(make, stride):
        load()
        (made,) = box
        for name, weights in made.initial.items():
            assert torch.equal(made.master(name), -weights), places
            assert torch.equal(made.parameter(name), -weights.bfloat16()), places


def test_a_slot_whose_read_ctrl_c_has_left_in_flight_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor]
) -> None:
    faults = MemoryFaults()
    made = stepped(store=memory_store(faults))
    read = made.store.read

    class Interrupted:
        def __init__(self, **keywords: Any) -> None:
            self._ticket = read(**keywords)

        def done(self) -> bool:
            return self._ticket.done()

        def wait(self) -> None:
            raise KeyboardInterrupt

    faults.paused = True
    with monkeypatch.context() as patch:
        patch.setattr(made.store, "read", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.groups.keep_high("0_3")
    assert not made.slots.reclaim(SLOTS["slot_bytes"]), "the drive fills both"
    faults.paused = False
    assert torch.equal(masters(made), expected[True])


def test_low_halves_that_ctrl_c_has_left_are_given_back_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stepped()
    discard = made.store.discard

    def interrupt(*, key: str) -> bool:
        if key == "low.4_4":
            raise KeyboardInterrupt
        return discard(key=key)

    with monkeypatch.context() as patch:
        patch.setattr(made.store, "discard", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_whole(made)
    assert made.groups.group("4_4").form is MasterForm.WHOLE
    make_whole(made)
    for parameter in made.parameters.values():
        made.optimizer.state[parameter]["step"] = torch.tensor(2.0)
    own_step = dict.fromkeys(SIZES, torch.zeros(3, dtype=torch.bfloat16))
    made.step(own_step, 1.0)
    assert not any(key.startswith("low.") for key in made.store.keys())  # noqa: SIM118
