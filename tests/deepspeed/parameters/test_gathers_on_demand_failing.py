"""Gathers of what is still being read that fail, and Ctrl-C: no parameter is left in flight."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters.gathers_on_demand import GatherHandles, GatherOnDemand
from memascend.errors import StoreError
from tests.support.ctrl_c import interrupted
from tests.support.gather_bench import ABSENT, FLYING, THERE, Bench
from tests.support.swapped_parameters import PATIENCE_S


@pytest.fixture
def bench() -> Bench:
    return Bench()


def gathered_anew(bench: Bench, *indexes: int) -> None:
    """Waits for what is in flight, gathers what is absent, and compares."""
    for index in list(bench.registry):
        bench.wait(index)
    absent = [index for index in indexes if bench.params[index].ds_status is ABSENT]
    if absent:
        bench.gather(*absent).wait()
    for index in indexes:
        assert bench.params[index].ds_status is THERE
        assert bench.is_whole(index)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_read_that_fails_is_told_to_whoever_waits_for_it(is_alone: bool) -> None:
    bench = Bench(is_alone=is_alone)
    bench.store.failing.add(("read", "param.1"))
    bench.prefetch(0, 1)
    bench.gather(0, 1)
    bench.wait(0)
    with pytest.raises(StoreError):
        bench.wait(1)
    assert bench.statuses()[:2] == [THERE, ABSENT]
    bench.store.failing.clear()
    gathered_anew(bench, 0, 1)


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_walk_that_fails_is_told_to_whoever_waits_for_its_values(
    bench: Bench, is_listed: bool
) -> None:
    may_go = threading.Event()

    def step(_: object) -> None:
        assert may_go.wait(PATIENCE_S)
        raise StoreError(5, "the walk failed")

    bench.walk.start([step], {bench.swapper.key(bench.params[0]): (0, 1)}, lambda: None)
    bench.prefetch(0)
    handle = bench.gather(0)
    may_go.set()
    with pytest.raises(StoreError, match="the walk failed"):
        handle.wait() if is_listed else bench.wait(0)
    bench.registry.clear()
    assert bench.statuses()[0] is ABSENT
    with pytest.raises(StoreError, match="the walk failed"):
        bench.walk.finish()
    gathered_anew(bench, 0)
    bench.walk.close()


def test_out_of_memory_gives_up_what_began_together(bench: Bench) -> None:
    bench.prefetch(0, 1, 2)
    bench.gather(0, 1, 2)
    bench.finish_read(1)
    bench.out_of_memory = True
    with pytest.raises(torch.OutOfMemoryError):
        bench.wait(0)
    assert bench.statuses() == [ABSENT, ABSENT, FLYING]
    bench.out_of_memory = False
    gathered_anew(bench, 0, 1, 2)


def test_out_of_memory_in_the_rest_of_a_list_notes_nothing_of_it(bench: Bench) -> None:
    bench.prefetch(1)
    bench.out_of_memory = True
    with pytest.raises(torch.OutOfMemoryError):
        bench.gather(0, 1)
    assert bench.statuses() == [ABSENT] * 3
    bench.out_of_memory = False
    bench.gather(0, 1).wait()
    gathered_anew(bench, 0, 1)


def test_a_read_that_cannot_begin_leaves_who_waited_for_another_absent(bench: Bench) -> None:
    may_go = threading.Event()
    late = bench.swapper.key(bench.params[1])
    bench.walk.start([lambda _: may_go.wait(PATIENCE_S) or None], {late: (0, 1)}, lambda: None)
    bench.prefetch(0, 1)
    bench.gather(0, 1)
    may_go.set()
    bench.walk.finish()
    read = bench.store.read
    bench.store.read = refuse  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="cannot read"):
        bench.wait(0)
    assert bench.statuses() == [ABSENT, FLYING, ABSENT]
    bench.store.read = read  # type: ignore[method-assign]
    gathered_anew(bench, 0, 1)
    bench.walk.close()


def refuse(**_: object) -> None:
    raise StoreError(5, "cannot read: an earlier write failed")


def test_the_first_error_is_told_where_a_read_that_nobody_needs_fails_too(bench: Bench) -> None:
    bench.store.failing.add(("read", "param.1"))
    bench.prefetch(0, 1, 2)
    bench.finish_read(0)
    bench.out_of_memory = True
    with pytest.raises(torch.OutOfMemoryError):
        bench.gather(0, 1, 2)
    assert bench.statuses() == [ABSENT] * 3


def test_who_waits_for_what_another_thread_gathers_waits_for_that(bench: Bench) -> None:
    bench.prefetch(0, 1)
    bench.gather(0, 1)
    bench.finish_read(1)
    found: list[ZeroParamStatus] = []

    def wait() -> None:
        bench.wait(1)
        found.append(bench.params[1].ds_status)
        bench.lock.waited_for.set()

    other = threading.Thread(target=wait)

    def let_in() -> None:
        other.start()
        assert bench.lock.waited_for.wait(PATIENCE_S)

    bench.before_gather = let_in
    bench.wait(0)  # begins the other one, too
    other.join(PATIENCE_S)
    assert found == [THERE]
    assert bench.is_whole(1)


@pytest.mark.parametrize("is_alone", [True, False])
def test_ctrl_c_at_any_line_leaves_each_absent_or_in_flight_with_a_handle(is_alone: bool) -> None:
    line = 0
    while True:
        bench = Bench(is_alone=is_alone)
        bench.prefetch(0, 1)

        def work(bench: Bench = bench) -> None:
            handle = bench.params[0].all_gather_coalesced(bench.params, quantize=False)
            for param in bench.params:
                bench.registry[param.ds_id] = handle.of(param)
            bench.finish_read(1)
            bench.wait(0)

        where = interrupted(line, work)
        line += 1
        if where and where[0].endswith(ENTERING):
            continue
        for index, status in enumerate(bench.statuses()):
            assert status is not FLYING or index in bench.registry, (where, index)
        gathered_anew(bench, 0, 1, 2)
        if not where:
            break
    assert line > 20


def first_line(function: Any) -> str:
    """Return where a function begins."""
    lines = [line for _, _, line in function.__code__.co_lines() if line]
    return f"{function.__code__.co_filename}:{sorted(set(lines))[1]}"


#: There DeepSpeed has taken a handle from its registry, or has not put one in, and we have none.
ENTERING = (first_line(GatherOnDemand.wait), first_line(GatherHandles.of))
