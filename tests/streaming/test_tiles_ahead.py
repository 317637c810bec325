"""Tiles that are read before the walk begins: the same values, whatever comes in between."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ctrl_c import interruptions
from tests.support.tiled_training import SIZES, Training, gradients

BF16 = torch.bfloat16
NAMES = list(SIZES)


def training(**options: Any) -> Training:
    """One that has made a step."""
    made = Training(torch.optim.AdamW, **options)
    made.step(gradients(0, BF16), 1.0)
    return made


def values(made: Training) -> list[torch.Tensor]:
    states = (None, *made.groups.group(NAMES[0]).states)
    return [made.master(name, state) for name in NAMES for state in states]


def assert_equal(one: Training, other: Training) -> None:
    pairs = zip(values(one), values(other), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def reads(made: Training, patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the key of each read from now on."""
    keys: list[str] = []
    read = made.store.read

    def note(*, key: str, **keywords: Any) -> Any:
        keys.append(key)
        return read(key=key, **keywords)

    patch.setattr(made.store, "read", note)
    return keys


def test_the_first_tiles_are_read_once_and_without_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, other = training(), training()
    keys = reads(made, monkeypatch)
    made.stream.read_ahead(NAMES)
    states = ["master.0_3", "state.0_3.exp_avg", "state.0_3.exp_avg_sq"]
    assert keys == states * 3
    made.stream.read_ahead(NAMES)
    assert keys == states * 3
    made.step(gradients(1, BF16), 0.5)
    ahead_count = len(keys)
    monkeypatch.undo()
    keys = reads(made, monkeypatch)
    made.step(gradients(2, BF16), 0.5)
    assert len(keys) == ahead_count
    for number in (1, 2):
        other.step(gradients(number, BF16), 0.5)
    assert_equal(made, other)


def set_weights(made: Training) -> None:
    made.stream.drain()
    made.groups.set(NAMES[0], 0, torch.arange(SIZES[NAMES[0]]).float(), state=None)


def forget_states(made: Training) -> None:
    """As a load does that is given no states."""
    made.groups.forget_states()
    made.optimizer.state.clear()


def leave_out(made: Training) -> None:
    """As where a norm is not finite: gradients come, and come again."""
    for name, value in gradients(7, BF16).items():
        made.spool.put(name, 0, value)
    made.stream.read_ahead(NAMES)


@pytest.mark.parametrize("change", [set_weights, forget_states, leave_out])
def test_what_comes_before_the_walk_is_seen_by_it(change: Callable[[Training], None]) -> None:
    made, other = training(), training()
    made.stream.read_ahead(NAMES)
    for one in (made, other):
        change(one)
        one.step(gradients(1, BF16), 0.5)
    assert_equal(made, other)


@pytest.mark.parametrize(
    ("names", "early"),
    [(NAMES[::-1], {}), (NAMES, {NAMES[0]: frozenset({0})}), (NAMES[1:], {})],
    ids=["another order", "a tile that was early", "fewer sub-groups"],
)
def test_a_walk_that_begins_elsewhere_reads_its_own_tiles(
    names: list[str], early: dict[str, frozenset[int]]
) -> None:
    made = training()
    made.stream.read_ahead(NAMES)
    for name, value in gradients(1, BF16).items():
        made.spool.put(name, 0, value)
    made.stream.begin(names, early)
    first = 4096 if early else 0
    with made.stream._ahead.lend_next() as tile:
        assert (tile.owner, tile.begin) == (names[0], first)
        begin = tile.begin
        master = tile.master[: tile.numel].clone()
        gradient = tile.raw[: tile.numel].clone()
    made.stream.drain()
    assert torch.equal(master, made.master(names[0])[begin : begin + len(master)])
    assert torch.equal(gradient, gradients(1, BF16)[names[0]][begin : begin + len(master)])


def test_before_the_first_step_nothing_is_known_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Training(torch.optim.AdamW)
    keys = reads(made, monkeypatch)
    made.stream.read_ahead([])
    assert not keys


def test_an_error_of_the_drive_is_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training()
    monkeypatch.setattr(made.tiles, "read", broken_read(made))
    made.stream.read_ahead(NAMES)
    monkeypatch.undo()
    with pytest.raises(OSError, match="the drive is gone"):
        made.step(gradients(1, BF16), 0.5)
    with pytest.raises(OSError, match="the drive is gone"):  # of the tiles behind it
        made.stream.drain()
    assert not made.groups.integrity.is_torn
    made.step(gradients(1, BF16), 0.5)
    other = training()
    other.step(gradients(1, BF16), 0.5)
    assert_equal(made, other)


def broken_read(made: Training) -> Callable[..., None]:
    """Return a read that fails when it is waited for."""

    class Failing:
        def wait(self) -> None:
            raise OSError("the drive is gone")

        def done(self) -> bool:
            return True

    def read(tile: Any, key: str, target: torch.Tensor) -> None:
        tile.tickets.append(Failing())

    return read


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.full)])
def test_after_ctrl_c_while_tiles_are_read_the_step_is_right(stride: int) -> None:
    expected = training(tile_numel=16384, tile_count=2)
    expected.step(gradients(1, BF16), 0.5)
    box: list[Training] = []

    def make() -> Callable[[], None]:
        box[:] = [training(tile_numel=16384, tile_count=2)]
        return functools.partial(box[0].stream.read_ahead, NAMES)

    for places in interruptions(make, stride):
        box[0].stream.read_ahead(NAMES)
        box[0].step(gradients(1, BF16), 0.5)
        pairs = zip(values(box[0]), values(expected), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs), places
