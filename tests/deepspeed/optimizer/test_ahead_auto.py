"""A run that finds out by itself whether steps begin during backward, unseen by its script."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from memascend.base.streams import PARAMETERS
from memascend.deepspeed.optimizer.ahead import AfterBackward
from memascend.deepspeed.optimizer.ahead_choice import work_ahead
from memascend.deepspeed.optimizer.guess import WITHIN_COUNT
from memascend.deepspeed.optimizer.worth import ROW_COUNT, WARM_COUNT, Worth
from memascend.errors import StoreFullError
from memascend.plan.second_values import saving_bytes
from memascend.streaming.optimizer.sub_group_step import early_key
from tests.deepspeed.optimizer.test_ahead_gone import (
    change_betas_in_place,
    clip,
    grow_scale,
    hook,
    set_state,
)
from tests.deepspeed.optimizer.test_ahead_guessed import (
    ABOVE,
    LIMIT,
    WITHIN,
    another_backward,
    counts,
    read_gradient,
    replace_gradient,
)
from tests.support.early_optimizer import (
    TILES,
    all_early,
    assert_equal,
    backward,
    change_rate,
    make,
    step,
    train,
)
from tests.support.tiled_optimizer import NAMES

pytestmark = pytest.mark.deepspeed

DECIDED_COUNT = WARM_COUNT + 4 * ROW_COUNT


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)


class Clock:
    """The time of a run whose steps take `after_s`, and `early_s` if they begin in backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, early_s: float = 1.0) -> None:
        self.now_s, self.early_s, self.worths = 0.0, early_s, list[Worth]()
        monkeypatch.setattr("memascend.deepspeed.optimizer.ahead_choice.Worth", self._make)

    def _make(self) -> Worth:
        self.worths.append(Worth(lambda: self.now_s))
        return self.worths[-1]

    def train(self, optimizer: Any, numbers: range, **keywords: Any) -> None:
        for number in numbers:
            backward(optimizer, number)
            all_early(optimizer)
            ahead = optimizer.steps._ahead
            self.now_s += self.early_s if getattr(ahead, "_has_parts", False) else 2.0
            step(optimizer, **keywords)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pair(**options: Any) -> tuple[Any, Any]:
    return make(early="auto", **options), make(early=False, **options)


def early_keys(optimizer: Any) -> list[str]:
    found: list[str] = optimizer.runtime.store.keys()
    return [key for key in found if key.startswith(early_key(""))]


@pytest.mark.parametrize("limit", [0.0, LIMIT])
def test_steps_that_pay_begin_during_backward_with_and_without_clipping(
    clock: Clock, limit: float, caplog: pytest.LogCaptureFixture
) -> None:
    both = pair(clip_grad=limit)
    with caplog.at_level(logging.INFO, "memascend"):
        for optimizer in both:
            clock.train(optimizer, range(DECIDED_COUNT + 3), norm=WITHIN)
    early = 2 * ROW_COUNT + 3
    assert counts(both[0]) == (early, 0)
    assert both[0].steps.early_tile_count == early * TILES
    assert caplog.text.count("begin during backward from now on") == 1
    assert_equal(*both)


def test_steps_that_do_not_pay_stay_after_backward_and_give_their_space_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, early_s=3.0)
    both = pair()
    for optimizer in both:
        clock.train(optimizer, range(DECIDED_COUNT), norm=WITHIN)
    assert early_keys(both[0])
    for optimizer in both:
        clock.train(optimizer, range(DECIDED_COUNT, DECIDED_COUNT + 6), norm=WITHIN)
    assert not early_keys(both[0])
    assert isinstance(both[0].steps._ahead, AfterBackward)
    assert counts(both[0]) == (2 * ROW_COUNT, 0)
    assert_equal(*both)


def until_first(clock: Clock, **options: Any) -> tuple[Any, Any]:
    """Both, before the first step that begins during backward."""
    both = pair(**options)
    for optimizer in both:
        clock.train(optimizer, range(WARM_COUNT + ROW_COUNT), norm=WITHIN)
    assert counts(both[0]) == (0, 0)
    return both


@pytest.mark.parametrize(
    "change",
    [
        change_rate,
        grow_scale,
        set_state,
        change_betas_in_place,
        clip,
        hook,
        replace_gradient,
    ],
)
def test_without_clipping_nothing_is_refused_either(
    clock: Clock, change: Callable[[Any], None]
) -> None:
    both = until_first(clock)
    for optimizer in both:
        member = optimizer.training.members[NAMES[0]][0]
        optimizer.stage3.grad_position = {0: (0, member.offset, member.numel)}
        backward(optimizer, 4)
        all_early(optimizer)
        change(optimizer)
        step(optimizer, norm=WITHIN)
    assert counts(both[0]) == (0, 1)
    for optimizer in both:
        train(optimizer, range(5, 8), norm=WITHIN)
    assert_equal(*both)


@pytest.mark.parametrize("disturb", [read_gradient, another_backward])
def test_looks_and_another_pass_spoil_nothing(clock: Clock, disturb: Callable[[Any], None]) -> None:
    both = until_first(clock)
    for optimizer in both:
        backward(optimizer, 4)
        all_early(optimizer)
        disturb(optimizer)
        step(optimizer, norm=WITHIN)
    assert counts(both[0]) == (1, 0)
    assert_equal(*both)


def test_a_norm_above_the_limit_makes_a_step_again(clock: Clock) -> None:
    both = until_first(clock, clip_grad=LIMIT)
    for optimizer in both:
        train(optimizer, range(1), norm=ABOVE)
        train(optimizer, range(1, 3 + WITHIN_COUNT), norm=WITHIN)
    assert counts(both[0])[1] == 1
    assert_equal(*both)


def full(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = optimizer.runtime.store
    reserve = store.reserve

    def refuse(*, key: str, nbytes: int) -> None:
        if key.startswith(early_key("")):
            raise StoreFullError("the drive is full")
        reserve(key=key, nbytes=nbytes)

    monkeypatch.setattr(store, "reserve", refuse)


def leave(optimizer: Any, missing: int) -> None:
    """As a drive on which so many bytes are missing for saving the run."""
    plan = SimpleNamespace(spare_count=4, trained_numel=1000, drive={PARAMETERS: 500}, resident={})
    optimizer.runtime.plan = plan
    optimizer.runtime.drive.free_bytes = lambda: saving_bytes(plan) - missing


def nearly_full(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(optimizer, 1)


@pytest.mark.parametrize("fill", [full, nearly_full])
def test_a_drive_without_room_is_told_once_and_is_no_warning(
    fill: Callable[[Any, pytest.MonkeyPatch], None],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    both = pair()
    fill(both[0], monkeypatch)
    with caplog.at_level(logging.INFO, "memascend"):
        for optimizer in both:
            clock.train(optimizer, range(DECIDED_COUNT), norm=WITHIN)
    told = [record for record in caplog.records if "no room" in record.message]
    assert [record.levelno for record in told] == [logging.INFO]
    assert not early_keys(both[0])
    assert both[0].steps.early_tile_count == 0
    assert_equal(*both)


def test_a_drive_that_fills_up_gets_its_space_back_before_a_save_needs_it(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    both = pair()
    leave(both[0], 0)
    early = 3
    for optimizer in both:
        clock.train(optimizer, range(WARM_COUNT + ROW_COUNT + early), norm=WITHIN)
    assert counts(both[0]) == (early, 0)
    assert early_keys(both[0])
    leave(both[0], 1)
    with caplog.at_level(logging.INFO, "memascend"):
        for optimizer in both:
            numbers = range(WARM_COUNT + ROW_COUNT + early, DECIDED_COUNT)
            clock.train(optimizer, numbers, norm=WITHIN)
    assert caplog.text.count("1 B less than that takes") == 1
    assert not early_keys(both[0])
    space = both[0].runtime.store.stats()
    assert space["reserved_bytes"] == space["used_bytes"] > 0
    assert both[0].steps.early_tile_count == early * TILES
    assert_equal(*both)


def test_second_values_of_other_ranks_are_counted_before_these_take_them(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for missing, begun in ((0, 0), (-(1 << 30), 1)):
        optimizer = make(early="auto")
        leave(optimizer, missing)
        clock.train(optimizer, range(WARM_COUNT + ROW_COUNT + 1), norm=WITHIN)
        assert counts(optimizer) == (begun, 0)


@pytest.mark.parametrize("choice", ["auto", True])
def test_without_a_chance_only_a_demand_is_answered_with_a_warning(
    choice: Any, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = make(early=choice, fused=False)
    assert isinstance(optimizer.steps._ahead, AfterBackward)
    assert ("has no effect" in caplog.text) == (choice is True)


def test_without_memory_for_waiting_gradients_steps_stay_after_backward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = make(early="auto")
    optimizer.runtime.plan = SimpleNamespace(spare_count=0)
    with caplog.at_level(logging.INFO, "memascend"):
        chosen = work_ahead(
            optimizer.upstream,
            optimizer.runtime,
            optimizer.steps._fused,
            streams_gradients=True,
            overlaps=bool,
            turn_off=int,
            after_backward=AfterBackward(optimizer.stream),
        )
    assert isinstance(chosen, AfterBackward)
    assert "host_memory_limit" in caplog.text
