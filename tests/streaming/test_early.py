"""Tiles that are stepped early: which, when, and that forgetting them changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from memascend.errors import StoreError
from memascend.streaming.early import EarlyPart, EarlySteps
from memascend.streaming.updates import EarlyStep, early_key
from tests.support.tiled_training import SIZES, Training, gradients, lose_drive_at

BF16 = torch.bfloat16
NAMES = list(SIZES)
TILE_NUMEL = 4096
FACTOR = 0.5


def descend(
    *,
    begin: int,
    gradient: torch.Tensor,
    factor: float,
    weight: torch.Tensor,
    values: Any,
    output: Any,
) -> None:
    """Stand for a fused step: element by element, in fp32."""
    weight.sub_(gradient.float() * factor)
    for state in values.values():
        if isinstance(state, torch.Tensor):
            state.add_(1.0)
    if output is not None:
        output.copy_(weight)


class Counted:
    """The same for the step that is made: it counts."""

    def __init__(self) -> None:
        self.elements: list[int] = []

    def __call__(self, *, values: Any, gradient: torch.Tensor, **tensors: Any) -> None:
        values["step"] += 1
        self.elements.append(gradient.numel())
        descend(values=values, gradient=gradient, **tensors)


class Early:
    """A Training of which every parameter is on the drive, with states, and steps made early."""

    def __init__(self) -> None:
        self.training = Training(lambda params: torch.optim.SGD(params, lr=1.0), state_count=1)
        self.store = self.training.store
        self.stream = self.training.stream
        self.stream._take_over = self.take_over
        self.members = {name: self.training.members[name][:2] for name in NAMES}
        self.training.members = self.members
        for name in NAMES:
            group = self.training.groups.group(name)
            self.training.groups.add_state(name, "moment", torch.float32, 0.0)
            self.training.groups.settle()
            for key in (*group.all_keys, *(member.key for member in self.members[name])):
                self.store.reserve(key=early_key(key), nbytes=self.store.nbytes(key=key))
            parameter = self.training.parameters[name]
            self.training.optimizer.state[parameter] = {"step": 0, "moment": torch.empty(0)}
        self.executor = ThreadPoolExecutor(1)
        self.may_step = threading.Event()
        self.may_step.set()
        self.early = EarlySteps(stream=self.stream, is_stored=self.is_stored, run=self.run)
        self.stored = True

    def take_over(self, *, key: str, other: str) -> None:
        self.store.exchange(key=key, other=other)

    def is_stored(self, name: str, begin: int) -> bool:
        return self.stored

    def run(self, function: Callable[[], None]) -> Future[None]:
        def held() -> None:
            assert self.may_step.wait(30)
            function()

        return self.executor.submit(held)

    def begin(self) -> None:
        self.early.begin(
            [
                EarlyPart(
                    step=EarlyStep(name, descend, FACTOR, self.members[name]),
                    begins=self.training.groups.begins(name),
                    places=[(0, SIZES[name])],
                )
                for name in NAMES
            ]
        )

    def put(self, number: int, *names: str) -> None:
        for name in names:
            self.training.spool.put(name, 0, gradients(number, BF16)[name])
            self.early.note(name, 0)

    def finish(self, fused: Counted) -> None:
        """Make the step, with whatever was early."""
        self.early.close()
        begins, error = self.early.take()
        assert error is None
        self.training.step({}, FACTOR, fused, begins)

    def values(self) -> list[torch.Tensor]:
        found = []
        for name in NAMES:
            found.append(self.training.parameter(name))
            found += [self.training.master(name, state) for state in (None, "moment")]
            found.append(torch.tensor(self.state(name)["step"]))
        return found

    def state(self, name: str) -> Any:
        return self.training.optimizer.state[self.training.parameters[name]]


@pytest.fixture
def made() -> Iterator[Callable[[], Early]]:
    every: list[Early] = []

    def make() -> Early:
        every.append(Early())
        return every[-1]

    yield make
    for one in every:
        one.may_step.set()
        one.executor.shutdown()


def assert_equal(one: Early, other: Early) -> None:
    pairs = zip(one.values(), other.values(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("count", range(len(NAMES) + 1))
def test_early_or_not_the_values_are_equal(made: Callable[[], Early], count: int) -> None:
    early, late = made(), made()
    for number in range(3):
        early.begin()
        early.put(number, *reversed(NAMES[:count]))
        early.executor.submit(int).result()  # behind all tiles
        early.early.close()
        early.put(number, *NAMES[count:])
        late.put(number, *NAMES)
        fused = Counted()
        early.finish(fused)
        late.finish(Counted())
        # A sub-group whose tiles were all early is counted, once, without any element.
        stepped = sum(SIZES[name] for name in NAMES[count:])
        assert sum(fused.elements) == stepped
        assert_equal(early, late)


def test_a_part_of_a_sub_group_is_early_and_the_step_makes_the_rest(
    made: Callable[[], Early],
) -> None:
    early, late = made(), made()
    early.begin()
    early.may_step.clear()
    early.put(0, *NAMES)
    # Two tiles of the first sub-group are stepped, and the third finds that this is over.
    stepped = threading.Semaphore(0)
    step_early = early.stream.step_early

    def count(*arguments: Any) -> tuple[str, int]:
        found = step_early(*arguments)
        stepped.release()
        if found == (NAMES[0], TILE_NUMEL):
            early.early._is_open = False
        return found

    early.stream.step_early = count  # type: ignore[method-assign]
    early.may_step.set()
    assert stepped.acquire(timeout=30)
    assert stepped.acquire(timeout=30)
    fused = Counted()
    early.finish(fused)
    late.put(0, *NAMES)
    late.finish(Counted())
    assert sum(fused.elements) == sum(SIZES.values()) - 2 * TILE_NUMEL
    assert_equal(early, late)


def test_what_is_forgotten_was_never_there(made: Callable[[], Early]) -> None:
    early, late = made(), made()
    before = early.values()
    early.begin()
    early.put(0, *NAMES)
    early.early.forget()
    assert all(torch.equal(a, b) for a, b in zip(before, early.values(), strict=True))
    for one in (early, late):
        one.put(1, *NAMES)
        one.finish(Counted())
    assert_equal(early, late)


def test_a_gradient_that_comes_twice_makes_nothing_early(made: Callable[[], Early]) -> None:
    early = made()
    early.begin()
    early.put(0, NAMES[0])
    early.put(1, NAMES[0], NAMES[1])
    early.early.close()
    assert early.early.take() == ({}, None)


def test_a_tile_waits_until_its_gradients_are_stored(made: Callable[[], Early]) -> None:
    early = made()
    early.stored = False
    early.begin()
    early.put(0, NAMES[0])
    early.early.close()
    assert early.early.take() == ({}, None)
    early.begin()
    early.put(0, NAMES[0])
    early.stored = True
    early.put(0, NAMES[1])
    early.executor.submit(int).result()  # behind all tiles
    early.early.close()
    begins, _ = early.early.take()
    assert begins == {name: frozenset(range(0, SIZES[name], TILE_NUMEL)) for name in NAMES[:2]}


def test_a_tile_waits_for_the_last_of_its_gradients(made: Callable[[], Early]) -> None:
    early = made()
    step = EarlyStep(NAMES[0], descend, FACTOR, early.members[NAMES[0]])
    begins = early.training.groups.begins(NAMES[0])
    places = [(0, 5000), (5000, 7000), (12_000, SIZES[NAMES[0]] - 12_000)]
    early.early.begin([EarlyPart(step=step, begins=begins, places=places)])
    early.training.spool.put(NAMES[0], 0, gradients(0, BF16)[NAMES[0]])
    found = []
    for offset in (12_000, 0, 5000):
        early.early.note(NAMES[0], offset)
        early.executor.submit(int).result()
        found.append(set(early.early._done.get(NAMES[0], ())))
    later = {12_288, 16_384}
    assert found == [later, later | {0}, {0, 4096, 8192} | later]


def test_an_error_makes_nothing_early_and_is_told(
    made: Callable[[], Early], monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = made(), made()
    lose_drive_at(3, early.stream, monkeypatch)
    early.begin()
    early.put(0, *NAMES)
    early.executor.submit(int).result()
    early.early.close()
    begins, error = early.early.take()
    assert begins == {}
    assert isinstance(error, StoreError)
    assert early.early.take() == ({}, None)
    late.put(0, *NAMES)
    for one in (early, late):
        one.finish(Counted())
    assert_equal(early, late)


def test_sub_groups_of_nobody_are_left_alone(made: Callable[[], Early]) -> None:
    early = made()
    early.early.begin([])
    early.put(0, *NAMES)
    assert early.early.take() == ({}, None)
