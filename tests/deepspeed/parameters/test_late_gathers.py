"""Gathers of what is still being read, as DeepSpeed's coordinator asks for them and waits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.support.streaming_fakes import CountedPool, FakeStore

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, _no_gather_coalesced
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry

from memascend.deepspeed.parameters.gather import wrap_convert, wrap_fetch, wrap_register
from memascend.deepspeed.parameters.late_gathers import GatherHandles
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.streaming.parameters import ParameterStream
from memascend.streaming.walk import Walk
from tests.support.swapped_parameters import NUMEL, PATIENCE_S, WatchedLock, parameter

ABSENT, FLYING, THERE = (
    ZeroParamStatus.NOT_AVAILABLE,
    ZeroParamStatus.INFLIGHT,
    ZeroParamStatus.AVAILABLE,
)


class Bench:
    """Parameters 0, 1, 2 and so on over a drive that finishes a read when it is waited for."""

    def __init__(self, *, is_alone: bool = True, count: int = 3) -> None:
        self.store = FakeStore()
        self.walk = Walk()
        self.lock = WatchedLock()
        self.swapper = ParameterSwapper(
            attachment=SimpleNamespace(),  # type: ignore[arg-type]
            stream=ParameterStream(store=self.store, pool=CountedPool(), walk=self.walk),
            dtype=torch.bfloat16,
            lock=self.lock,
            is_alone=is_alone,
        )
        self.out_of_memory = False
        self.before_gather: Callable[[], object] = int
        self.gathered: list[list[int]] = []
        self.params = [parameter(ds_id) for ds_id in range(count)]
        for param in self.params:
            param.ds_shape, param.ds_numel = (NUMEL,), NUMEL
            param.nvme_swapper = self.swapper
            buffer = self.swapper.get_buffer(param, NUMEL)
            param.ds_tensor.data = buffer.fill_(param.ds_id + 1).data
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
            self.swapper.swap_out_and_release([param])
            wrap_convert(self._convert)(None, param)
        self.store.tickets.clear()
        self.registry: dict[int, Any] = {}

    def _convert(self, init: Any, param: Any) -> None:
        def all_gather_coalesced(params: Any, **_: Any) -> Any:
            self.before_gather()
            self.gathered.append([param.ds_id for param in params])
            if self.out_of_memory:
                raise torch.OutOfMemoryError("no memory left")
            return _no_gather_coalesced(list(params))

        def all_gather(param_list: Any, **_: Any) -> None:
            if param_list:
                _no_gather_coalesced(param_list).wait()

        param.all_gather_coalesced, param.all_gather = all_gather_coalesced, all_gather

    def read_ahead(self, *indexes: int) -> None:
        self.swapper.swap_in([self.params[index] for index in indexes], async_op=True)

    def gather(self, *indexes: int) -> Any:
        """As the coordinator does; what it registers for each is in `registry`."""
        params = [self.params[index] for index in indexes]
        handle = params[0].all_gather_coalesced(params, quantize=False)
        for param in params:
            assert param.ds_status is FLYING
            own = handle.of(param) if isinstance(handle, GatherHandles) else handle
            self.registry[param.ds_id] = own
        return handle

    def wait(self, index: int) -> None:
        """As the coordinator does, who has no handle any more whatever becomes of the wait."""
        self.registry.pop(index).wait(handle_dependency=True)

    def finish_read(self, index: int) -> None:
        for ticket in self.store.tickets:
            if ticket.key == f"param.{index}":
                ticket.finish()

    def pending(self) -> list[str]:
        return [ticket.key for ticket in self.store.tickets if not ticket.finished]

    def statuses(self) -> list[ZeroParamStatus]:
        return [param.ds_status for param in self.params]

    def is_whole(self, index: int) -> bool:
        data = self.params[index].data
        return data.numel() == NUMEL and bool((data == index + 1).all())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_is_being_read_is_gathered_when_it_is_waited_for_and_it_alone(bench: Bench) -> None:
    bench.read_ahead(0, 1, 2)
    bench.gather(0, 1, 2)
    assert bench.pending() == ["param.0", "param.1", "param.2"]
    assert bench.statuses() == [FLYING] * 3
    bench.wait(1)
    assert bench.pending() == ["param.0", "param.2"]
    assert bench.statuses() == [FLYING, THERE, FLYING]
    assert [bench.is_whole(index) for index in range(3)] == [False, True, False]


def test_it_is_gathered_at_the_first_wait_or_gather_behind_its_arrival(bench: Bench) -> None:
    bench.read_ahead(0, 1, 2)
    bench.gather(0, 1, 2)
    bench.finish_read(1)
    bench.wait(0)
    assert bench.is_whole(1)
    bench.finish_read(2)
    bench.params[0].ds_status = ABSENT  # released
    bench.read_ahead(0)
    bench.gather(0)
    assert bench.is_whole(2)
    assert bench.pending() == ["param.0"]
    reads = len(bench.store.tickets)
    for index in range(3):
        bench.wait(index)
    assert bench.statuses() == [THERE] * 3
    assert len(bench.store.tickets) == reads


def test_what_is_here_is_gathered_at_once(bench: Bench) -> None:
    bench.read_ahead(0, 1)
    bench.finish_read(0)
    handle = bench.gather(0, 1)
    assert bench.is_whole(0)
    assert bench.pending() == ["param.1"]
    handle.wait()  # all of it
    assert bench.statuses()[:2] == [THERE] * 2
    bench.swapper.drop_unused()
    for param in bench.params[:2]:
        param.ds_status = ABSENT
    bench.read_ahead(0, 1)
    bench.finish_read(0)
    bench.finish_read(1)
    assert not isinstance(bench.gather(0, 1), GatherHandles)


def test_what_nobody_has_read_ahead_is_read_and_gathered_now(bench: Bench) -> None:
    bench.read_ahead(1)
    bench.gather(0, 1)
    assert bench.is_whole(0)
    assert bench.pending() == ["param.1"]


def test_what_is_in_flight_is_not_gathered_again(bench: Bench) -> None:
    bench.read_ahead(0)
    bench.gather(0)
    bench.params[0].ds_summary = lambda: ""
    with pytest.raises(RuntimeError, match="NOT_AVAILABLE"):
        bench.gather(0)
    bench.wait(0)
    assert bench.is_whole(0)


@pytest.mark.parametrize("keyword", ["quantize", "safe_mode"])
def test_what_is_gathered_in_a_special_way_is_gathered_now(bench: Bench, keyword: str) -> None:
    bench.read_ahead(0)
    bench.params[0].all_gather_coalesced([bench.params[0]], **{keyword: True})
    assert bench.is_whole(0)


def test_the_registry_of_deepspeed_has_for_each_parameter_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = wrap_register(InflightParamRegistry.__setitem__)
    monkeypatch.setattr(InflightParamRegistry, "__setitem__", wrapped)
    bench.read_ahead(0, 1)
    handle = bench.gather(0, 1)
    registry: Any = InflightParamRegistry()
    keys = [Key(param) for param in bench.params]
    for key in keys[:2]:
        registry[key] = handle
    registry[keys[0]].wait(handle_dependency=True)
    assert bench.pending() == ["param.1"]
    stock = object()
    registry[keys[2]] = stock
    assert registry[keys[2]] is stock


class Key:
    """A parameter that a dict takes."""

    def __init__(self, param: Any) -> None:
        self.ds_id, self.ds_status = param.ds_id, FLYING


# -- several ranks ---------------------------------------------------------------------------------


def test_with_several_ranks_arrival_begins_nothing() -> None:
    bench = Bench(is_alone=False)
    bench.read_ahead(0, 1, 2)
    bench.gather(0, 1)
    bench.finish_read(0)
    bench.finish_read(1)
    bench.gather(2)
    assert bench.gathered == []


def test_where_deepspeed_lets_go_of_all_that_was_gathered_ahead_all_begin() -> None:
    """It waits for one after the other, in the order of a set that each rank has its own of."""
    bench = Bench(is_alone=False)
    bench.gather(0, 1)
    bench.gather(2)
    bench.wait(2)
    assert bench.gathered == [[0, 1, 2]]
    bench.wait(0)
    assert bench.gathered == [[0, 1, 2]]


def test_a_blocking_gather_of_several_ranks_begins_what_it_needs() -> None:
    bench = Bench(is_alone=False)
    bench.gather(0)
    bench.gather(1)
    bench.params[1].all_gather(param_list=bench.params[1:2])
    assert bench.gathered == [[1]]
    assert bench.statuses() == [FLYING, FLYING, ABSENT]


def fetch(bench: Bench, module: list[int], ahead: list[int], chance: random.Random) -> None:
    """As DeepSpeed: gather what the module needs, wait for it in any order, and gather ahead."""

    def original(*_: object) -> None:
        absent = [index for index in module if bench.params[index].ds_status is ABSENT]
        if absent:
            bench.gather(*chance.sample(absent, len(absent)))
        for index in chance.sample(module, len(module)):
            if index in bench.registry:
                bench.wait(index)
            assert bench.is_whole(index)
        if ahead:
            bench.read_ahead(*ahead)
            bench.gather(*chance.sample(ahead, len(ahead)))

    listed = [(str(index), bench.params[index]) for index in module]
    layer = SimpleNamespace(
        named_parameters=lambda recurse: listed, ds_external_parameters=lambda: []
    )
    wrap_fetch(original)(None, layer, True)


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 7), min_size=1, unique=True), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_ranks_begin_alike_whatever_has_arrived_and_in_whatever_order_they_wait(
    modules: list[list[int]], chance: random.Random
) -> None:
    ranks = [Bench(is_alone=False, count=8) for _ in range(2)]
    for place, module in enumerate(modules):
        absent = [i for i in range(8) if ranks[0].params[i].ds_status is ABSENT]
        ahead = [i for i in absent if i not in module and chance.random() < 0.5]
        for bench in ranks:
            fetch(bench, module, ahead, chance)
            for index in chance.sample(range(8), 2):
                bench.finish_read(index)
            for index in module:
                bench.params[index].ds_status = ABSENT  # released
        assert [sorted(ids) for ids in ranks[0].gathered] == [
            sorted(ids) for ids in ranks[1].gathered
        ], place
        assert ranks[0].statuses() == ranks[1].statuses()


def test_all_that_a_module_needs_is_gathered_as_one_and_nothing_else() -> None:
    bench = Bench(is_alone=False, count=4)
    chance = random.Random(0)
    fetch(bench, [0], [1, 2], chance)
    assert bench.gathered == [[0]]
    fetch(bench, [2, 3], [], chance)
    assert [sorted(ids) for ids in bench.gathered] == [[0], [2, 3]]
    assert bench.pending() == ["param.1"]


# -- what looks at a parameter in between ----------------------------------------------------------


def test_a_blocking_gather_begins_what_is_late_as_if_it_had_never_been(bench: Bench) -> None:
    bench.read_ahead(0, 1)
    bench.gather(0, 1)
    bench.params[0].all_gather(param_list=bench.params[:1])
    assert bench.is_whole(0)
    assert bench.statuses()[:2] == [FLYING] * 2  # as one that DeepSpeed gathered ahead
    assert bench.pending() == ["param.1"]


def test_what_gave_way_meanwhile_is_read_again(bench: Bench) -> None:
    bench.read_ahead(0)
    bench.gather(0)
    bench.swapper.drop_unused()
    bench.read_ahead(0)  # DeepSpeed takes it to be in flight
    assert len(bench.store.tickets) == 1
    bench.wait(0)
    assert bench.is_whole(0)


def test_releasing_the_buffers_of_one_that_stays_leaves_it_to_its_gather(bench: Bench) -> None:
    bench.read_ahead(0)
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
    bench.read_ahead(0, 1)
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
