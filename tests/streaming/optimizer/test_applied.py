"""Updates of matrices applied as they are made: tiles, gaps, second values, errors."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from memascend.errors import StoreError, StoreFullError
from memascend.nvme.resident import ResidentStore
from memascend.nvme.store import MemoryFaults
from memascend.streaming.optimizer.applied import AppliedUpdates
from memascend.streaming.optimizer.sub_group import Member
from memascend.streaming.optimizer.sub_group_step import early_key
from tests.support.streaming_hosts import memory_store
from tests.support.tiled_training import SIZES, Training

BF16 = torch.bfloat16
NAMES = ["0_3", "4_4"]  # five tiles, and two


class Applied:
    """A Training whose members are all on the drive, and its second values."""

    def __init__(self, **options: Any) -> None:
        self.training = training = Training(
            lambda params: torch.optim.SGD(params, lr=1.0), **options
        )
        self.store = ResidentStore(training.store, stream_of=lambda key: None)
        training.stream._take_over = self.store.take_over
        self.members = {}
        for name in NAMES:
            training.groups.group(name).apart = frozenset({"momentum"})
            training.groups.add_state(name, "momentum", BF16, 0.0)
            self.store.reserve(key=f"param.{name}", nbytes=2 * SIZES[name])
            self.members[name] = [Member(0, SIZES[name], BF16, key=f"param.{name}")]
        training.groups.settle()
        self.values = AppliedUpdates(stream=training.stream, store=self.store, state="momentum")
        for name in NAMES:
            self.values.reserve(name, self.members[name])

    def apply(self, name: str, *updates: tuple[int, torch.Tensor]) -> None:
        self.values.apply(name, self.members[name], iter(updates), subtract)

    def second(self, name: str) -> torch.Tensor:
        found = torch.empty(SIZES[name])
        key = early_key(self.training.groups.group(name).key())
        self.store.read(key=key, target=found).wait()
        return found


def subtract(weight: torch.Tensor, update: torch.Tensor) -> None:
    assert weight.dtype == update.dtype == torch.float32
    weight.sub_(update)


def whole(name: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("cuts", [[], [5000], [4096, 8192], [1, 2, 3, 20_000]])
def test_tiles_and_updates_cut_each_other_and_old_values_stay(cuts: list[int]) -> None:
    applied, update = Applied(), whole("0_3")
    begins, ends = [0, *cuts], [*cuts, SIZES["0_3"]]
    applied.values.start(NAMES)
    applied.apply("0_3", *((a, update[a:b]) for a, b in zip(begins, ends, strict=True)))
    applied.apply("4_4", (0, whole("4_4", 1)))
    applied.values.finish()
    for name, change in (("0_3", update), ("4_4", whole("4_4", 1))):
        old = applied.training.initial[name]
        assert torch.equal(applied.second(name), old - change.float())
        assert torch.equal(applied.training.master(name), old)
    begins_of = applied.training.groups.begins
    assert applied.values.take() == {name: frozenset(begins_of(name)) for name in NAMES}
    applied.values.drop()
    assert applied.values.take() == {}


def test_elements_without_an_update_change_by_nothing() -> None:
    applied, update = Applied(), whole("0_3")
    applied.values.start(["0_3"])
    applied.apply("0_3", (100, update[100:200]), (9000, update[9000:9001]))
    applied.values.finish()
    expected = torch.zeros(SIZES["0_3"])
    for some in (slice(100, 200), slice(9000, 9001)):
        expected[some] = update[some].float()
    old = applied.training.initial["0_3"]
    assert torch.equal(applied.second("0_3"), old - expected)


def test_momentum_takes_its_second_value_over_and_leaves_the_one_before() -> None:
    applied = Applied()
    key = applied.training.groups.group("0_3").key("momentum")
    applied.store.write(key=early_key(key), source=whole("0_3", 2)).wait()
    applied.values.start(["0_3"])
    applied.apply("0_3", (0, whole("0_3")))
    applied.values.finish()
    found = torch.empty(SIZES["0_3"], dtype=BF16)
    for name, expected in ((key, whole("0_3", 2)), (early_key(key), torch.zeros_like(found))):
        applied.store.read(key=name, target=found).wait()
        assert torch.equal(found, expected)


def test_the_walk_takes_weights_over_and_leaves_momentum() -> None:
    applied = Applied()
    training = applied.training
    training.members |= applied.members
    key = training.groups.group("0_3").key("momentum")
    applied.store.write(key=early_key(key), source=whole("0_3", 2)).wait()
    applied.values.start(["0_3"])
    applied.apply("0_3", (0, whole("0_3")))
    applied.values.finish()
    training.step({}, 1.0, early=applied.values.take())
    expected = training.initial["0_3"] - whole("0_3").float()
    assert torch.equal(training.master("0_3"), expected)
    assert torch.equal(training.parameter("0_3"), expected.bfloat16())
    assert torch.equal(training.master("4_4"), training.initial["4_4"])
    assert torch.equal(training.master("0_3", "momentum"), whole("0_3", 2).float())


def test_an_update_is_dropped_before_the_next_one_is_made() -> None:
    """Its device memory may be needed."""
    applied, alive = Applied(), []

    class Part(torch.Tensor):
        pass

    def updates() -> Iterator[tuple[int, torch.Tensor]]:
        for begin in range(0, SIZES["0_3"], 5000):
            assert not [one for one in alive if one() is not None]
            update = whole("0_3")[begin : begin + 5000].clone().as_subclass(Part)
            alive.append(weakref.ref(update))
            pair = begin, update
            del update
            yield pair
            del pair

    applied.values.start(["0_3"])
    applied.values.apply("0_3", applied.members["0_3"], updates(), subtract)
    assert len(alive) == 5


def test_room_is_reserved_once_and_given_back() -> None:
    applied = Applied()
    assert not applied.values.reserve("0_3", applied.members["0_3"])
    keys = [key for key in applied.store.keys() if key.startswith("early.")]  # noqa: SIM118
    assert len(keys) == 2 * len(["master", "momentum", "param"])
    applied.values.discard()
    assert not any(key.startswith("early.") for key in applied.store.keys())  # noqa: SIM118
    assert applied.values.reserve("0_3", applied.members["0_3"])


def test_a_full_drive_leaves_nothing_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = Applied()
    applied.values.discard()
    reserve, count = applied.store.reserve, iter(range(3))

    def fill_up(**options: Any) -> None:
        if next(count) == 2:
            raise StoreFullError(errno.ENOSPC, "full")
        reserve(**options)

    monkeypatch.setattr(applied.store, "reserve", fill_up)
    with pytest.raises(StoreFullError):
        applied.values.reserve("0_3", applied.members["0_3"])
    assert not any(key.startswith("early.") for key in applied.store.keys())  # noqa: SIM118


def test_only_values_on_the_drive_have_second_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = Applied()
    assert applied.values.is_on_drive("0_3", applied.members["0_3"])
    in_memory = Member(0, SIZES["0_3"], BF16, tensor=torch.empty(SIZES["0_3"], dtype=BF16))
    assert not applied.values.is_on_drive("0_3", [in_memory])
    key = applied.training.groups.group("0_3").key("momentum")
    for wanted in (key, "param.0_3"):
        in_part = {wanted: 1}
        monkeypatch.setattr(applied.store, "memory_of", lambda *, key, of=in_part: of.get(key, 0))
        assert not applied.values.is_on_drive("0_3", applied.members["0_3"])
        assert applied.values.is_on_drive("4_4", applied.members["4_4"])


def test_after_a_failed_write_second_keys_are_made_anew() -> None:
    faults = MemoryFaults()
    applied = Applied(store=memory_store(faults))
    applied.values.start(["4_4"])

    def subtract_and_fail(weight: torch.Tensor, update: torch.Tensor) -> None:
        faults.gone = errno.EROFS  # both tiles have been read
        subtract(weight, update)

    update, members = (0, whole("4_4")), applied.members["4_4"]

    def fail() -> None:
        applied.values.apply("4_4", members, iter([update]), subtract_and_fail)
        applied.training.stream.drain()  # a write may fail behind the last tile

    with pytest.raises(StoreError):
        fail()
    with suppress(StoreError):
        applied.training.stream.drain()  # as a load does
    faults.gone = 0
    with pytest.raises(StoreError):
        applied.second("4_4")
    applied.values.reserve("4_4", members)
    applied.values.start(["4_4"])
    applied.apply("4_4", update)
    applied.values.finish()
    assert torch.equal(applied.second("4_4"), applied.training.initial["4_4"] - whole("4_4"))


def test_momentum_of_steps_during_backward_takes_its_second_values_over() -> None:
    applied = Applied()
    key = applied.training.groups.group("4_4").key("momentum")
    old, new = (torch.full((SIZES["4_4"],), value, dtype=torch.bfloat16) for value in (1.0, 2.0))
    for name, value in ((key, old), (early_key(key), new)):
        applied.training.store.write(key=name, source=value).wait()
    applied.values.take_over_momentum(["4_4"])
    found = torch.empty_like(old)
    for name, value in ((key, new), (early_key(key), old)):
        applied.training.store.read(key=name, target=found).wait()
        assert torch.equal(found, value), "the one of before stays, for an update made again"
