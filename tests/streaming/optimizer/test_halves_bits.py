"""Master weights in halves whose flags are bits, stepped by updates: the bits of whole ones."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from memascend.errors import StoreError
from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.low_bits import LowBits
from memascend.streaming.optimizer.sub_group import FLAGS, MasterForm
from tests.streaming.optimizer.test_halves import change_members, set_ties, ties
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import SIZES, Training, gradients

MOMENTUM = {"momentum": torch.bfloat16}
NAME = "0_3"
Act = Callable[[Training], None]


def fused(*, gradient: torch.Tensor, weight: torch.Tensor, factor: float, **unused: Any) -> None:
    """A step by an update, on whole weights alone."""
    assert (gradient.dtype, weight.dtype, factor) == (torch.float32, torch.float32, 1.0)
    weight.mul_(1 - 1e-3)
    weight.add_(gradient, alpha=-0.1)


def idle(**unused: Any) -> None:
    """A step that leaves all weights."""


def training(*, split: bool, low_bits: LowBits = LowBits.BITS, **options: Any) -> Training:
    found = Training(torch.optim.Adam, split=split, low_bits=low_bits, apart=MOMENTUM, **options)
    for name, parameter in found.parameters.items():
        if not split:
            found.groups.set(name, 0, found.initial[name].bfloat16().float(), state=None)
        found.groups.add_state(name, "momentum", torch.bfloat16, 0.0)
        found.optimizer.state[parameter] = {}
    return found


def step(number: int, update: Any = fused) -> Act:
    return lambda one: one.step(gradients(number, torch.bfloat16), 0.37, update)


@pytest.mark.parametrize(
    "acts",
    [
        [step(0), step(1), step(2)],
        [set_ties, step(0, idle), step(1, idle), step(2)],
        [step(0), change_members, step(1), step(2)],
        [change_members, set_ties, step(0, idle), step(1)],
    ],
)
@pytest.mark.parametrize("tile_numel", [4096, 8192])
def test_steps_by_updates_have_the_bits_of_whole_weights(acts: list[Act], tile_numel: int) -> None:
    halves, whole = training(split=True, tile_numel=tile_numel), training(split=False)
    for act in acts:
        act(halves)
        if act is not change_members:  # there weights do not depend on members
            act(whole)
    for name in SIZES:
        assert torch.equal(halves.master(name), whole.master(name)), name
        assert torch.equal(halves.parameter(name), whole.parameter(name)), name
        assert halves.groups.group(name).form is MasterForm.ROUNDED


def test_any_range_of_ties_is_read_by_its_own_flags() -> None:
    one = training(split=True)
    set_ties(one)
    step(0, idle)(one)
    for begin, count in ((0, 1), (11, 4900), (1234, 77), (4095, 3)):
        found = torch.empty(count)
        one.groups.get(NAME, 11 + begin, found, state=None)
        assert torch.equal(found, ties(5000)[begin:][:count])


def test_flags_are_an_eighth_of_a_byte_and_not_there_before_the_first_step() -> None:
    one = training(split=True)
    group = one.groups.group(NAME)
    assert one.store.nbytes(key=group.key(FLAGS)) == -(-SIZES[NAME] // 8)
    assert FLAGS in group.fills
    step(0)(one)
    assert FLAGS not in group.fills


def test_whole_weights_and_discarded_ones_leave_no_flags() -> None:
    one = training(split=True)
    step(0)(one)
    before = one.master(NAME)
    one.groups.make_whole(NAME)
    assert torch.equal(one.master(NAME), before)
    key = one.groups.group(NAME).key(FLAGS)
    assert not one.store.contains(key=key)
    other = one.groups.group("4_4").key(FLAGS)
    assert one.store.contains(key=other)
    one.groups.discard()
    assert not one.store.contains(key=other)


def test_a_loaded_checkpoint_replaces_weights_and_members() -> None:
    one = training(split=True)
    step(0)(one)
    value = ties(5000).repeat(5)[: SIZES[NAME]].contiguous()
    one.load(NAME, None, value)
    one.stream.drain()
    assert torch.equal(one.master(NAME), value)
    step(1, idle)(one)
    assert torch.equal(one.master(NAME), value)
    assert torch.equal(one.parameter(NAME), value.bfloat16())


def test_a_form_without_flags_moves_a_tie_by_its_last_place() -> None:
    one = training(split=True, low_bits=LowBits.UNFLAGGED)
    set_ties(one)
    step(0, idle)(one)
    found = torch.empty(5000)
    one.groups.get(NAME, 11, found, state=None)
    moved = found.view(torch.int32) - ties(5000).view(torch.int32)
    assert sorted(moved.unique().tolist()) == [0, 1]


def test_after_flags_could_not_be_written_a_load_is_enough() -> None:
    """They are not loaded, and every step writes them in parts."""
    faults = MemoryFaults()
    one = training(split=True, store=memory_store(faults), tile_numel=4096)
    expected = training(split=True, tile_numel=4096)
    step(0)(one)

    def failing(**values: Any) -> None:
        fused(**values)
        faults.gone = errno.EROFS

    with pytest.raises(StoreError):
        step(1, failing)(one)
    faults.gone = 0
    with suppress(StoreError):
        one.stream.drain()
    one.groups.begin_load()
    for each in (one, expected):
        for name, numel in SIZES.items():
            each.load(name, None, ties(5000).repeat(5)[:numel].contiguous())
            each.load(name, "momentum", torch.zeros(numel))
            each.stream.drain()
    one.current.mend()
    for number in (2, 3):
        for each in (one, expected):
            step(number)(each)
    for name in SIZES:
        assert torch.equal(one.master(name), expected.master(name)), name
