"""Gathers of what is still being read, as DeepSpeed's coordinator asks for them and waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry

from memascend.deepspeed.parameters import gather, gathers_on_demand
from memascend.deepspeed.parameters.gather import wrap_register
from memascend.deepspeed.parameters.gathers_on_demand import GatherHandles
from tests.support.gather_bench import ABSENT, FLYING, THERE, Bench
from tests.support.swapped_parameters import NUMEL, PATIENCE_S


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_is_being_read_is_gathered_when_it_is_waited_for_and_it_alone(bench: Bench) -> None:
    bench.prefetch(0, 1, 2)
    bench.gather(0, 1, 2)
    assert bench.pending() == ["param.0", "param.1", "param.2"]
    assert bench.statuses() == [FLYING] * 3
    bench.wait(1)
    assert bench.pending() == ["param.0", "param.2"]
    assert bench.statuses() == [FLYING, THERE, FLYING]
    assert [bench.is_whole(index) for index in range(3)] == [False, True, False]


def test_it_is_gathered_at_the_first_wait_or_gather_behind_its_arrival(bench: Bench) -> None:
    bench.prefetch(0, 1, 2)
    bench.gather(0, 1, 2)
    bench.finish_read(1)
    bench.wait(0)
    assert bench.is_whole(1)
    bench.finish_read(2)
    bench.params[0].ds_status = ABSENT  # released
    bench.prefetch(0)
    bench.gather(0)
    assert bench.is_whole(2)
    assert bench.pending() == ["param.0"]
    reads = len(bench.store.tickets)
    for index in range(3):
        bench.wait(index)
    assert bench.statuses() == [THERE] * 3
    assert len(bench.store.tickets) == reads


class Stream:
    """A stream of a device; notes whom it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.name)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams that blocks have made current, the current one last."""
    current = [Stream("main")]

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    for module in (gather, gathers_on_demand):
        monkeypatch.setattr(module, "stream_here", lambda: current[-1])
    monkeypatch.setattr(gathers_on_demand, "on_stream", on_stream)
    return current


def test_a_gather_begins_on_the_stream_it_was_asked_for_on(
    bench: Bench, streams: list[Stream]
) -> None:
    """DeepSpeed asks on its own stream, a script gathers by hand on another one."""
    begun_on: list[str] = []
    bench.before_gather = lambda: begun_on.append(streams[-1].name)
    main, own = streams[0], Stream("DeepSpeed's")
    bench.prefetch(0, 1)
    with gathers_on_demand.on_stream(own):
        bench.gather(0, 1)
    bench.params[0].all_gather(param_list=bench.params[:1])
    assert (begun_on, main.waited_for) == (["DeepSpeed's"], ["DeepSpeed's"])
    with gathers_on_demand.on_stream(own):
        bench.wait(1)
    assert begun_on == ["DeepSpeed's"] * 2
    assert own.waited_for == []
    assert bench.is_whole(0)
    assert bench.is_whole(1)


def test_gathers_asked_for_on_several_streams_begin_on_each(streams: list[Stream]) -> None:
    bench = Bench(is_alone=False)
    begun_on: list[str] = []
    bench.before_gather = lambda: begun_on.append(streams[-1].name)
    one, other = Stream("one"), Stream("other")
    for stream, indexes in ((one, (0,)), (other, (1,)), (one, (2,))):
        with gathers_on_demand.on_stream(stream):
            bench.gather(*indexes)
    bench.params[0].all_gather(param_list=bench.params)
    assert begun_on == ["one", "other"]
    assert bench.gathered == [[0, 2], [1]]
    assert streams[0].waited_for == ["one", "other", "one"]


def test_who_gathers_by_hand_waits_on_the_stream_of_what_has_begun(
    bench: Bench, streams: list[Stream]
) -> None:
    own = Stream("DeepSpeed's")
    bench.prefetch(0)
    bench.finish_read(0)
    with gathers_on_demand.on_stream(own):
        bench.gather(0)
    assert bench.statuses()[0] is FLYING
    bench.params[0].all_gather(param_list=bench.params[:1])
    assert streams[0].waited_for == ["DeepSpeed's"]
    assert bench.statuses()[0] is THERE


def test_what_is_here_is_gathered_at_once(bench: Bench) -> None:
    bench.prefetch(0, 1)
    bench.finish_read(0)
    handle = bench.gather(0, 1)
    assert bench.is_whole(0)
    assert bench.pending() == ["param.1"]
    handle.wait()  # all of it
    assert bench.statuses()[:2] == [THERE] * 2
    bench.swapper.drop_unused()
    bench.registry.clear()
    for param in bench.params[:2]:
        param.ds_status = ABSENT
    bench.prefetch(0, 1)
    bench.finish_read(0)
    bench.finish_read(1)
    assert not isinstance(bench.gather(0, 1), GatherHandles)


def test_what_nobody_has_read_ahead_is_read_and_gathered_now(bench: Bench) -> None:
    bench.prefetch(1)
    bench.gather(0, 1)
    assert bench.is_whole(0)
    assert bench.pending() == ["param.1"]


def test_what_is_in_flight_is_not_gathered_again(bench: Bench) -> None:
    bench.prefetch(0)
    bench.gather(0)
    bench.params[0].ds_summary = lambda: ""
    with pytest.raises(RuntimeError, match="NOT_AVAILABLE"):
        bench.gather(0)
    bench.wait(0)
    assert bench.is_whole(0)


@pytest.mark.parametrize("keyword", ["quantize", "safe_mode"])
def test_what_is_gathered_in_a_special_way_is_gathered_now(bench: Bench, keyword: str) -> None:
    bench.prefetch(0)
    bench.params[0].all_gather_coalesced([bench.params[0]], **{keyword: True})
    assert bench.is_whole(0)


def test_the_registry_of_deepspeed_has_for_each_parameter_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = wrap_register(InflightParamRegistry.__setitem__)
    monkeypatch.setattr(InflightParamRegistry, "__setitem__", wrapped)
    bench.prefetch(0, 1)
    handle = bench.gather(0, 1)
    registry: Any = InflightParamRegistry()
    keys = [Key(param) for param in bench.params]
    for key in keys[:2]:
        registry[key] = handle
    bench.registry[0] = registry[keys[0]]
    bench.wait(0)
    assert bench.pending() == ["param.1"]
    stock = object()
    registry[keys[2]] = stock
    assert registry[keys[2]] is stock


class Key:
    """A parameter that a dict takes."""

    def __init__(self, param: Any) -> None:
        self.ds_id, self.ds_status = param.ds_id, FLYING


# -- what looks at a parameter in between ----------------------------------------------------------


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_blocking_gather_has_what_was_gathered_ahead_and_deepspeed_may_do_so_again(
    is_alone: bool, has_begun: bool
) -> None:
    bench = Bench(is_alone=is_alone)
    bench.prefetch(0, 1)
    if has_begun:
        bench.finish_read(0)
    bench.gather(0, 1)
    bench.params[0].all_gather(param_list=bench.params[:1])
    assert bench.is_whole(0)
    assert bench.statuses()[:2] == [THERE, FLYING]
    assert list(bench.registry) == [1]
    bench.params[0].ds_status = ABSENT  # let go where GatheredParameters ends
    bench.gather(0)
    bench.wait(0, 1)
    assert bench.is_whole(0)


def test_one_that_came_with_its_list_is_not_waited_for_again(bench: Bench) -> None:
    bench.prefetch(0, 1)
    bench.finish_read(0)
    bench.finish_read(1)
    bench.gather(0, 1)
    bench.wait(1)
    assert bench.statuses()[:2] == [THERE] * 2
    bench.params[0].all_gather(param_list=bench.params[:1])
    assert list(bench.registry) == []


def test_what_gave_way_meanwhile_is_read_again(bench: Bench) -> None:
    bench.prefetch(0)
    bench.gather(0)
    bench.swapper.drop_unused()
    bench.prefetch(0)  # DeepSpeed takes it to be in flight
    assert len(bench.store.tickets) == 1
    bench.wait(0)
    assert bench.is_whole(0)


def test_releasing_the_buffers_of_one_that_stays_leaves_it_to_its_gather(bench: Bench) -> None:
    bench.prefetch(0)
    bench.gather(0)
    bench.swapper.remove_partition_and_release_buffers([bench.params[0]])
    assert bench.pending() == ["param.0"]
    bench.wait(0)
    assert len(bench.store.tickets) == 1
    assert bench.is_whole(0)


def test_what_the_optimizer_has_still_to_write_keeps_nobody_else(bench: Bench) -> None:
    may_go = threading.Event()
    name = bench.swapper.key(bench.params[1])
    bench.walk.start([lambda _: may_go.wait(PATIENCE_S) or None], {name: (0, 1)}, lambda: None)
    bench.prefetch(0, 1)
    bench.gather(0, 1)
    bench.wait(0)
    assert bench.is_whole(0)
    assert [ticket.key for ticket in bench.store.tickets] == ["param.0"]
    may_go.set()
    bench.wait(1)
    assert bench.is_whole(1)
    bench.walk.finish()
    bench.walk.close()


def test_one_that_never_goes_to_the_drive_waits_for_the_optimizer_too(bench: Bench) -> None:
    may_go = threading.Event()
    param = bench.params[0]
    name = bench.swapper.key(param)
    param.ds_tensor.final_location = None
    param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
    param.ds_tensor.data = torch.ones(NUMEL, dtype=torch.bfloat16)
    bench.walk.start([lambda _: may_go.wait(PATIENCE_S) or None], {name: (0, 1)}, lambda: None)
    bench.gather(0)
    assert not bench.is_whole(0)
    may_go.set()
    bench.wait(0)
    assert bench.is_whole(0)
    bench.walk.finish()
    bench.walk.close()
