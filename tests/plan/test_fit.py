"""The most tokens that fit: they do, one more does not, and what is short is named."""

from __future__ import annotations

from typing import Any

import pytest

from memascend.base.units import GIB
from memascend.plan.context import (
    OURS_CHECKPOINTS,
    STOCK_ALL,
    STOCK_CHECKPOINTS,
    STOCK_ON_HOST,
    WAYS,
    ContextPlan,
    Training,
    Way,
)
from memascend.plan.fit import DEVICE, HOST, TOKENS_MAX, Room, fit
from tests.support.trainings import training

ROOM = Room(device_bytes=24 * GIB, host_bytes=128 * GIB)


def plan_in_room(start: Training, way: Way, tokens: int) -> ContextPlan:
    return start.plan(way, tokens, device_bytes=ROOM.device_bytes)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.title)
@pytest.mark.parametrize("unit_tokens", [1, 4096])
def test_what_is_found_fits_and_one_more_does_not(way: Any, unit_tokens: int) -> None:
    start = training(has_fused_loss=True)
    found = fit(start, way, room=ROOM, unit_tokens=unit_tokens)
    if found.count:
        assert ROOM.short(plan_in_room(start, way, found.count * unit_tokens)) == {}
    short = ROOM.short(plan_in_room(start, way, (found.count + 1) * unit_tokens))
    assert short == found.limits != {}
    assert found.count or way is STOCK_ALL


def test_the_largest_batch_has_no_more_tokens_than_the_longest_context() -> None:
    start = training(has_fused_loss=True)
    longest = fit(start, OURS_CHECKPOINTS, room=ROOM, unit_tokens=1)
    largest = fit(start, OURS_CHECKPOINTS, room=ROOM, unit_tokens=4096)
    assert largest.count == longest.count // 4096


def test_host_memory_ends_what_is_kept_there() -> None:
    start = training(has_fused_loss=True)
    narrow = Room(device_bytes=96 * GIB, host_bytes=64 * GIB)
    assert set(fit(start, STOCK_ON_HOST, room=narrow, unit_tokens=1).limits) == {HOST}
    assert set(fit(start, OURS_CHECKPOINTS, room=narrow, unit_tokens=1).limits) == {DEVICE}


def test_what_does_not_fit_at_all_says_what_is_short() -> None:
    start = training()
    tiny = Room(device_bytes=GIB, host_bytes=32 * GIB)
    found = fit(start, STOCK_CHECKPOINTS, room=tiny, unit_tokens=1)
    assert found.count == 0
    plan = start.plan(STOCK_CHECKPOINTS, 1)
    assert found.limits == {
        DEVICE: plan.device_bytes - GIB,
        HOST: plan.host_bytes - 32 * GIB,
    }


def test_without_a_stated_host_memory_there_is_enough() -> None:
    start = training(has_fused_loss=True)
    found = fit(start, STOCK_ON_HOST, room=Room(device_bytes=96 * GIB), unit_tokens=1)
    assert set(found.limits) == {DEVICE}


def test_slices_of_one_sequence_fit_more_of_them() -> None:
    start, context = training(), 4096
    parts = {"room": ROOM, "unit_tokens": context}
    whole = fit(start, OURS_CHECKPOINTS, **parts)
    sliced = fit(start, OURS_CHECKPOINTS, **parts, slice_tokens_of=lambda count: context)
    assert sliced.count > 10 * whole.count > 0
    for count, is_enough in ((sliced.count, True), (sliced.count + 1, False)):
        plan = start.plan(
            OURS_CHECKPOINTS,
            count * context,
            slice_tokens=context,
            device_bytes=ROOM.device_bytes,
        )
        assert (ROOM.short(plan) == {}) == is_enough


def test_the_search_ends_where_memory_does_not() -> None:
    found = fit(training(), OURS_CHECKPOINTS, room=Room(device_bytes=1 << 80), unit_tokens=3)
    assert TOKENS_MAX // 2 < 3 * found.count <= TOKENS_MAX
    assert found.limits == {}


def test_more_memory_never_fits_less() -> None:
    start = training()
    rooms = [Room(device_bytes=n * GIB, host_bytes=128 * GIB) for n in (8, 16, 24, 48, 96)]
    counts = [fit(start, OURS_CHECKPOINTS, room=room, unit_tokens=1).count for room in rooms]
    assert counts == sorted(set(counts))
