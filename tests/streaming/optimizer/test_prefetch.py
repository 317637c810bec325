"""Tiles that are read before the walk begins: the same values, whatever comes in between."""

from __future__ import annotations

import errno
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.errors import StoreError
from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.step import Step
from tests.support.ctrl_c import each_stride, interruptions
from tests.support.streaming_hosts import memory_store
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
    made.stream.prefetch(NAMES)
    states = ["master.0_3", "state.0_3.exp_avg", "state.0_3.exp_avg_sq"]
    assert keys == states * 3
    made.stream.prefetch(NAMES)
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
    made.stream.drop_prefetched()
    made.groups.set(NAMES[0], 0, torch.arange(SIZES[NAMES[0]]).float(), state=None)


def leave_out(made: Training) -> None:
    """As where a norm is not finite: gradients come, and come again."""
    for name, value in gradients(7, BF16).items():
        made.gradient_stream.put(name, 0, value)
    made.stream.prefetch(NAMES)


@pytest.mark.parametrize("change", [set_weights, leave_out])
def test_what_comes_before_the_walk_is_seen_by_it(change: Callable[[Training], None]) -> None:
    made, other = training(), training()
    made.stream.prefetch(NAMES)
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
    made.stream.prefetch(NAMES)
    for name, value in gradients(1, BF16).items():
        made.gradient_stream.put(name, 0, value)
    made.stream.start(decided(names, early))
    first = 4096 if early else 0
    with made.stream._prefetch.next_tile() as tile:
        assert (tile.owner, tile.begin) == (names[0], first)
        begin = tile.begin
        master = tile.master[: tile.numel].clone()
        gradient = tile.raw[: tile.numel].clone()
    made.stream.drain()
    assert torch.equal(master, made.master(names[0])[begin : begin + len(master)])
    assert torch.equal(gradient, gradients(1, BF16)[names[0]][begin : begin + len(master)])


def test_tiles_of_a_walk_under_way_are_not_dropped() -> None:
    """A hook of the optimizer may set a value in the middle of a step."""
    made, other = training(), training()
    made.optimizer.register_step_post_hook(lambda *_: made.stream.drop_prefetched())
    for one in (made, other):
        one.step(gradients(1, BF16), 0.5)
    assert_equal(made, other)


class Failing:
    """A read that fails when it is waited for."""

    def wait(self) -> None:
        raise StoreError(errno.EIO, "the drive is gone")

    def done(self) -> bool:
        return True


def lose_reads(made: Training, patch: pytest.MonkeyPatch, *, at_once: bool) -> None:
    """Have each second read of a tile fail: when it begins, or when it is waited for."""
    read, calls = made.tiles.read, itertools.count()

    def fail(tile: Any, *arguments: Any) -> None:
        if next(calls) % 2 == 0:
            read(tile, *arguments)
        elif at_once:
            Failing().wait()
        else:
            tile.add(Failing())

    patch.setattr(made.tiles, "read", fail)


def assert_serves(made: Training) -> None:
    """Two steps are those of one that nothing happened to."""
    other = training()
    for one in (made, other):
        one.stream.prefetch(NAMES)
        one.step(gradients(1, BF16), 0.5)
        one.step(gradients(2, BF16), 0.5)
    assert_equal(made, other)


def test_a_read_that_cannot_begin_is_the_walks_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training()
    lose_reads(made, monkeypatch, at_once=True)
    made.stream.prefetch(NAMES)
    monkeypatch.undo()
    assert_serves(made)


def test_an_error_of_the_drive_is_the_steps_and_of_nothing_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = training()
    lose_reads(made, monkeypatch, at_once=False)
    made.stream.prefetch(NAMES)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="the drive is gone"):
        made.step(gradients(1, BF16), 0.5)
    assert not made.current.is_mixed
    assert_serves(made)


def test_an_error_of_what_is_dropped_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training()
    lose_reads(made, monkeypatch, at_once=False)
    made.stream.prefetch(NAMES)
    made.stream.drop_prefetched()
    monkeypatch.undo()
    assert_serves(made)


def test_a_walk_that_ctrl_c_ended_as_it_began_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some tiles have had their gradients read, and may get new ones."""
    made, calls = training(), itertools.count()
    start_read = made.gradient_stream.start_read

    def interrupt(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return start_read(*arguments, **keywords)

    interrupted = start(made)
    with monkeypatch.context() as patch:
        patch.setattr(made.gradient_stream, "start_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    keys = reads(made, monkeypatch)
    made.step(gradients(1, BF16), 0.5)
    assert keys.count(f"master.{NAMES[0]}") == len(made.tiles.begins(SIZES[NAMES[0]]))


def test_every_transfer_of_a_step_keeps_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = training(), list[bool]()

    def note(call: Callable[..., Any], *, key: str, hold: Any = None, **keywords: Any) -> Any:
        kept.append(hold is not None)
        return call(key=key, hold=hold, **keywords)

    for name, value in gradients(1, BF16).items():  # through staging slots, which keep themselves
        made.gradient_stream.put(name, 0, value)
    made.slots.wait_writes()
    for name in ("read", "write"):
        monkeypatch.setattr(made.store, name, functools.partial(note, getattr(made.store, name)))
    made.step({}, 0.5)
    assert kept
    assert all(kept)


def test_a_walk_waits_for_its_only_tile_that_ctrl_c_left_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = MemoryFaults()
    made = training(store=memory_store(faults), tile_count=1)
    wait_all = made.store.wait_all

    def complete() -> None:
        faults.paused = False
        wait_all()

    monkeypatch.setattr(made.store, "wait_all", complete)
    faults.paused = True
    tile = made.tiles.take(NAMES[1], 0, SIZES[NAMES[1]])
    made.tiles.read(tile, made.groups.group(NAMES[1]).key(), tile.master)
    del tile
    assert not made.tiles.has_idle()
    made.stream.start(decided(NAMES, {}))
    with made.stream._prefetch.next_tile() as tile:
        assert (tile.owner, tile.begin) == (NAMES[0], 0)
    made.stream.drain()


def prefetch(made: Training) -> Callable[[], None]:
    return functools.partial(made.stream.prefetch, NAMES)


def decided(names: list[str], early: dict[str, frozenset[int]]) -> Step:
    step = Step()
    step.decide(names, early)
    return step


def start(made: Training) -> Callable[[], None]:
    """Begin a walk whose first tiles are read."""
    for name, value in gradients(1, BF16).items():
        made.gradient_stream.put(name, 0, value)
    made.stream.prefetch(NAMES)
    return functools.partial(made.stream.start, decided(NAMES, {}))


@each_stride(7)
@pytest.mark.parametrize("tile_count", [1, 2])
@pytest.mark.parametrize("call", [prefetch, start])
def test_after_ctrl_c_the_step_is_right(
    call: Callable[[Training], Callable[[], None]], tile_count: int, stride: int
) -> None:
    options: dict[str, Any] = {"tile_numel": 16384, "tile_count": tile_count}
    expected = training(**options)
    expected.step(gradients(1, BF16), 0.5)
    box: list[Training] = []

    def make() -> Callable[[], None]:
        box[:] = [training(**options)]
        return call(box[0])

    for places in interruptions(make, stride):
        box[0].stream.prefetch(NAMES)
        box[0].step(gradients(1, BF16), 0.5)
        pairs = zip(values(box[0]), values(expected), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs), places
