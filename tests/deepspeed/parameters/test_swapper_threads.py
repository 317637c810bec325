"""Two of autograd's threads in the swapper, a host ahead of its device, failures, Ctrl-C."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.streaming_fakes import CountedPool, FakeMemory, FakeStore, FakeTicket

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.base.device_memory import RELEASED_BYTES_MIN
from memascend.base.units import PAGE_BYTES
from memascend.deepspeed.parameters.swapper import ParameterSwapper
from memascend.errors import StoreError
from memascend.memory.pool import Pool
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.ctrl_c import interruptions
from tests.support.swapped_parameters import (
    NUMEL,
    PATIENCE_S,
    WatchedLock,
    on_device,
    parameter,
)

ABSENT, THERE = PartitionedParamStatus.NOT_AVAILABLE, PartitionedParamStatus.AVAILABLE


class Bench:
    """A swapper over a store whose transfers a test may hold up."""

    def __init__(self, pool: Pool | None = None) -> None:
        self.store = FakeStore()
        self.pool = pool or CountedPool()
        self.lock = WatchedLock()
        self.swapper = ParameterSwapper(
            attachment=SimpleNamespace(),  # type: ignore[arg-type]
            stream=ParameterStream(store=self.store, pool=self.pool),
            dtype=torch.bfloat16,
            lock=self.lock,
        )

    def partitioned(self, count: int) -> list[Any]:
        """Parameters whose shards were stored; number i is filled with i + 1."""
        params = [parameter(ds_id, swapper=self.swapper) for ds_id in range(count)]
        for param in params:
            buffer = self.swapper.get_buffer(param, NUMEL)
            param.ds_tensor.data = buffer.fill_(param.ds_id + 1).data
            param.ds_tensor.status = THERE
            self.swapper.swap_out_and_release([param])
        self.store.tickets.clear()
        return params


def bounded() -> Pool:
    return Pool(memory=FakeMemory(), component="slots", budget_bytes=16 * PAGE_BYTES)


def values(params: list[Any]) -> list[float]:
    assert all(param.ds_tensor.unique().numel() == 1 for param in params)
    return [float(param.ds_tensor.view(-1)[0]) for param in params]


# -- two threads -----------------------------------------------------------------------------------


class Intruder:
    """Another thread, which begins while the first one waits for a transfer."""

    def __init__(self, bench: Bench, work: Callable[[], object]) -> None:
        self._bench, self._work = bench, work
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self._bench.lock.waited_for.set()

    def during(self, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
        """Has it begin when the transfer of `key` is waited for, and get as far as it can."""
        wait = FakeTicket.wait

        def wait_and_let_in(ticket: FakeTicket) -> None:
            if ticket.key == key and not self._thread.ident:
                self._thread.start()
                assert self._bench.lock.waited_for.wait(PATIENCE_S)
            wait(ticket)

        monkeypatch.setattr(FakeTicket, "wait", wait_and_let_in)

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_a_failing_read_of_one_thread_leaves_what_another_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    one, other, failing = bench.partitioned(3)
    bench.store.failing.add(("read", "param.2"))
    intruder = Intruder(bench, lambda: bench.swapper.swap_in([failing], async_op=False))
    intruder.during(monkeypatch, "param.0")
    bench.swapper.swap_in([one, other], async_op=False)
    assert values([one, other]) == [1.0, 2.0]
    intruder.end()
    assert isinstance(intruder.error, StoreError)
    assert values([one, other]) == [1.0, 2.0]


def test_two_threads_at_once_get_their_own_bytes() -> None:
    bench = Bench(bounded())
    params = bench.partitioned(8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors: list[BaseException] = []

    def pass_over(mine: list[Any]) -> None:
        try:
            for turn in range(60):
                pair = [mine[turn % 4], mine[(turn + 1) % 4]]
                bench.swapper.swap_in(pair, async_op=False)
                assert values(pair) == [param.ds_id + 1.0 for param in pair]
                bench.swapper.swap_in(mine, async_op=True)
                bench.swapper.remove_partition_and_release_buffers(pair)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=pass_over, args=(params[k::2],)) for k in (0, 1)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    bench.swapper.drop_unused()
    assert bench.pool.free_bytes == bench.pool.held_bytes


# -- a device --------------------------------------------------------------------------------------


def test_the_host_goes_no_further_ahead_than_so_much_device_memory() -> None:
    swapper = Bench().swapper
    events = on_device(swapper)
    for _ in range(8):
        swapper.wait_for_released()
        swapper.note_released(RELEASED_BYTES_MIN // 4)
    swapper.wait_for_released()
    assert len(events) == 8
    assert sum(not event.passed for event in events) == 4


def test_the_cpu_has_computed_when_a_parameter_is_let_go() -> None:
    swapper = Bench().swapper
    swapper.note_released(RELEASED_BYTES_MIN * 2)
    swapper.wait_for_released()


# -- a gather that failed --------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [True, False])
def test_what_a_failed_gather_has_begun_is_absent_again_and_holds_no_slot(
    synchronous: bool,
) -> None:
    bench = Bench(bounded())
    events = [] if synchronous else on_device(bench.swapper)
    params = bench.partitioned(3)
    bench.swapper.swap_in(params, async_op=False)
    params[0].ds_status, params[1].ds_status = ZeroParamStatus.AVAILABLE, ZeroParamStatus.INFLIGHT
    for param in params[:2]:
        param.data = torch.ones(NUMEL, dtype=torch.bfloat16)
    bench.swapper.give_up(params)
    assert {param.ds_status for param in params} == {ZeroParamStatus.NOT_AVAILABLE}
    assert [param.data.numel() for param in params] == [0] * 3
    assert [param.ds_tensor.status for param in params] == [ABSENT] * 3
    # On a device the slots are free behind the copies that were issued.
    assert [event.recorded for event in events] == [True] * (not synchronous)
    bench.swapper.drop_unused()
    assert all(event.wait_count for event in events)
    assert bench.pool.free_bytes == bench.pool.held_bytes
    bench.swapper.swap_in(params, async_op=False)
    assert values(params) == [1.0, 2.0, 3.0]


# -- Ctrl-C ----------------------------------------------------------------------------------------


def use(bench: Bench, params: list[Any]) -> None:
    """One pass: read ahead, read, let go."""
    bench.swapper.swap_in(params[1:], async_op=True)
    bench.swapper.swap_in(params[:2], async_op=False)
    bench.swapper.remove_partition_and_release_buffers(params[:2])


@pytest.mark.filterwarnings("error")  # Ctrl-C that the garbage collector swallows is one
@pytest.mark.parametrize("make_pool", [CountedPool, bounded])
def test_after_ctrl_c_at_any_line_a_pass_can_be_made_again(make_pool: Callable[[], Pool]) -> None:
    made: list[tuple[Bench, list[Any]]] = []

    def make() -> Callable[[], None]:
        bench = Bench(make_pool())
        made[:] = [(bench, bench.partitioned(3))]
        use(*made[0])
        return functools.partial(use, *made[0])

    count = 0
    for where in interruptions(make):
        count += 1
        [(bench, params)] = made
        for _ in range(2):
            bench.swapper.swap_in(params, async_op=False)
            assert values(params) == [1.0, 2.0, 3.0], where
            bench.swapper.remove_partition_and_release_buffers(params)
            assert [param.ds_tensor.status for param in params] == [ABSENT] * 3, where
        assert not bench.lock.is_held(), where
        bench.swapper.drop_unused()
    assert count > 100
    assert bench.pool.free_bytes == bench.pool.held_bytes
