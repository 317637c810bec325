"""Shards without a slot under DeepSpeed's own partitioning code, of one rank and of several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters import swapper as param_swapper
from tests.support.ctrl_c import each_stride, interruptions
from tests.support.partitioned_parameters import BUDGET_BYTES, Rank, content_of
from tests.support.swapped_parameters import on_device

SMALL, LARGE = (5, 7), (300, 101)  # a page holds 2048 elements, the largest slot 8192
ABSENT, THERE = PartitionedParamStatus.NOT_AVAILABLE, PartitionedParamStatus.AVAILABLE


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed asks for its rank only to know whether to print."""
    monkeypatch.setattr(partition_parameters, "print_rank_0", lambda *_, **__: None)


RANKS = [(0, 1), (0, 2), (1, 2), (2, 3)]
by_rank = pytest.mark.parametrize(("rank", "world"), RANKS)
by_shape = pytest.mark.parametrize("shape", [(1,), SMALL, LARGE, (70_001,)], ids=str)


@by_rank
@by_shape
def test_a_new_parameter_is_stored_and_leaves_no_host_memory(
    rank: int, world: int, shape: tuple[int, ...]
) -> None:
    bench, content = Rank(rank, world), content_of(shape)
    param = bench.parameter(content)
    bench.partition(param)
    assert torch.equal(bench.shard(param), bench.slice_of(param, content))
    assert param.ds_tensor.final_location is OffloadDeviceEnum.nvme
    assert (param.ds_tensor.status, param.ds_tensor.dim()) == (ABSENT, 0)
    assert bench.pool.free_bytes == bench.pool.held_bytes
    assert (bench.pool.held_bytes == 0) == (param.ds_tensor.ds_numel * 2 > BUDGET_BYTES // 4)


@by_rank
@by_shape
def test_a_modified_parameter_is_stored_anew(rank: int, world: int, shape: tuple[int, ...]) -> None:
    bench = Rank(rank, world)
    param = bench.parameter(content_of(shape))
    bench.partition(param)
    shard = param.ds_tensor
    changed = content_of(shape, seed=1)
    param.data, param.ds_status = changed.clone(), ZeroParamStatus.AVAILABLE
    bench.partition(param, updated=True)
    assert param.ds_tensor is shard
    assert torch.equal(bench.shard(param), bench.slice_of(param, changed))
    assert bench.pool.free_bytes == bench.pool.held_bytes


@by_shape
def test_a_module_that_is_cast_while_it_is_partitioned_keeps_its_shards_dtype(
    shape: tuple[int, ...],
) -> None:
    bench, content = Rank(), content_of(shape)
    param = bench.parameter(content)
    bench.partition(param)
    param.data = param.data.float()  # of no elements, as `module.to(torch.float32)` does
    bench.gather(param)
    assert torch.equal(param.data, content)
    assert param.ds_tensor.dtype == torch.bfloat16


@by_rank
@by_shape
def test_a_shard_is_stored_in_another_dtype(rank: int, world: int, shape: tuple[int, ...]) -> None:
    bench, content = Rank(rank, world), content_of(shape)
    param = bench.parameter(content)
    bench.partition(param)
    bench.param_swapper.recast(param, torch.float32)
    assert (param.ds_tensor.dtype, param.ds_tensor.dim()) == (torch.float32, 0)
    assert param.ds_tensor.status is ABSENT
    count = bench.slice_of(param, content).numel()
    stored = bench.store.value(f"param.{param.ds_id}", torch.float32)
    assert torch.equal(stored[:count], bench.slice_of(param, content).float())
    assert bench.pool.free_bytes == bench.pool.held_bytes


@by_shape
def test_a_gathered_parameter_is_whole_and_holds_no_slot(shape: tuple[int, ...]) -> None:
    bench, content = Rank(), content_of(shape)
    param = bench.parameter(content)
    bench.partition(param)
    bench.gather(param)
    assert torch.equal(param.data, content)
    assert param.ds_tensor.status is ABSENT
    # What is kept there gives way to anything.
    bench.param_swapper.drop_unused()
    assert bench.pool.free_bytes == bench.pool.held_bytes
    # Modified where it is, as GatheredParameters allows.
    param.data.mul_(2)
    bench.partition(param, updated=True)
    assert torch.equal(bench.shard(param), (content * 2).reshape(-1))


def test_the_slice_itself_is_stored_where_it_is_complete() -> None:
    """No second copy of a large parameter on the device."""
    bench = Rank(0, 2)
    param = bench.parameter(content_of(LARGE))
    numel = param.numel() // 2
    param.ds_tensor = None
    buffer = bench.param_swapper.get_buffer(param, numel)
    assert buffer.data_ptr() == param.data.data_ptr()
    last = Rank(1, 2)
    param = last.parameter(content_of((30_001,)))
    assert last.param_swapper.get_buffer(param, 15_001).data_ptr() != param.data.data_ptr()


def test_a_parameter_that_is_not_contiguous_is_stored_all_the_same() -> None:
    bench, content = Rank(), content_of(LARGE)
    param = bench.parameter(content)
    param.data = content.t()
    bench.partition(param)
    assert torch.equal(bench.shard(param), content.t().reshape(-1))


def test_an_absent_shard_keeps_its_dtype() -> None:
    """A coalesced gather casts to it when the collective is waited for."""
    bench = Rank()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        param = bench.parameter(content_of(SMALL).to(dtype))
        bench.partition(param)
        assert param.ds_tensor.dtype is dtype


def test_every_shard_lives_on_the_drive() -> None:
    bench = Rank()
    assert bench.param_swapper.swappable_tensor(numel=1)
    assert not bench.param_swapper.swappable_tensor(numel=0)


def test_storing_a_shard_that_was_let_go_is_refused() -> None:
    bench = Rank()
    param = bench.parameter(content_of(SMALL))
    bench.partition(param)
    with pytest.raises(AssertionError, match="no shard to store"):
        bench.param_swapper.swap_out_and_release([param])


# -- gathers in flight -----------------------------------------------------------------------------


def partitioned(bench: Rank, count: int, numel: int) -> list[Any]:
    params = [bench.parameter(content_of((numel,), seed)) for seed in range(count)]
    for param in params:
        bench.partition(param)
    return params


def test_many_gathers_before_the_first_wait_do_not_block() -> None:
    """On the CPU a collective may read the slot until it is waited for."""
    bench = Rank(0, 2)
    params = partitioned(bench, 12, 2 * 8000)
    for param in params:
        bench.param_swapper.swap_in([param], async_op=False)
        param.ds_status = ZeroParamStatus.INFLIGHT
        bench.param_swapper.after_gather([param])
    assert [param.ds_tensor.status for param in params] == [THERE] * 12
    for seed, param in enumerate(params):
        assert torch.equal(param.ds_tensor.data, content_of((2 * 8000,), seed)[:8000])
        param.ds_status = ZeroParamStatus.AVAILABLE
    assert bench.pool.held_bytes <= BUDGET_BYTES
    bench.param_swapper.drop_unused()
    assert bench.pool.free_bytes == bench.pool.held_bytes


def test_on_a_device_slots_come_back_with_their_copies() -> None:
    bench = Rank(0, 2)
    events = on_device(bench.param_swapper)
    params = partitioned(bench, 12, 2 * 8000)
    for param in params:
        bench.param_swapper.swap_in([param], async_op=False)
        bench.param_swapper.after_gather([param])
    assert [param.ds_tensor.status for param in params] == [ABSENT] * 12
    assert bench.pool.held_bytes <= BUDGET_BYTES
    assert sum(event.wait_count for event in events) == 8


@pytest.mark.parametrize("world", [1, 2])
def test_a_gather_of_several_ranks_finds_shards_on_their_way_to_the_device(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    copies: list[torch.Tensor] = []

    def start_copy(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    monkeypatch.setattr(param_swapper, "start_copy", start_copy)
    bench = Rank(0, world)
    params = partitioned(bench, 2, 2 * 1000)
    seen = [param.ds_tensor for param in params]
    bench.param_swapper.swap_in(params, async_op=False)
    bench.param_swapper.start_copies([*params, SimpleNamespace(ds_id=99)])
    assert len(copies) == (2 if world > 1 else 0)  # one rank copies into the parameter itself
    for param, copy in zip(params, copies, strict=False):
        assert param.ds_tensor.data_ptr() == copy.data_ptr()
        assert torch.equal(param.ds_tensor, content_of((2 * 1000,), param.ds_id)[:1000])
    bench.param_swapper.after_gather(params)
    assert [param.ds_tensor.status for param in params] == [ABSENT] * 2
    assert all(param.ds_tensor is one for param, one in zip(params, seen, strict=True))
    bench.param_swapper.drop_unused()
    assert bench.pool.free_bytes == bench.pool.held_bytes


def test_what_was_read_ahead_gives_way_to_what_is_needed() -> None:
    bench = Rank()
    params = partitioned(bench, 6, 8000)
    bench.param_swapper.swap_in(params[:2], async_op=True)
    assert [p.ds_tensor.status is ABSENT for p in params] == [False] * 2 + [True] * 4
    bench.param_swapper.swap_in([params[0], *params[3:]], async_op=False)
    assert [p.ds_tensor.status is THERE for p in params] == [True, False, False, *[True] * 3]
    assert params[1].ds_tensor.status is ABSENT


def test_a_large_parameter_is_not_read_ahead_and_stops_nothing() -> None:
    bench = Rank()
    (small,) = partitioned(bench, 1, 100)
    (large,) = partitioned(bench, 1, 30_000)
    (last,) = partitioned(bench, 1, 100)
    bench.param_swapper.swap_in([small, large, last], async_op=True)
    inflight = PartitionedParamStatus.INFLIGHT
    assert [p.ds_tensor.status for p in (small, large, last)] == [inflight, ABSENT, inflight]


@each_stride(7)
def test_after_ctrl_c_at_any_line_large_parameters_are_whole_and_all_slots_serve(
    stride: int,
) -> None:
    made: list[tuple[Rank, list[Any]]] = []

    def make() -> Callable[[], None]:
        bench = Rank()
        params = [*partitioned(bench, 1, 100), *partitioned(bench, 2, 9_000)]
        made[:] = [(bench, params)]
        return functools.partial(use, bench.param_swapper, params)

    count = 0
    for where in interruptions(make, stride):
        count += 1
        [(bench, params)] = made
        for ticket in bench.store.tickets:
            ticket.finish()  # those that nobody waits for any more
        for param in params:
            bench.gather(param)
            assert torch.equal(param.data, bench.shard(param)), where
        staging = bench.param_swapper._stream._chunks.staging
        assert staging is not None
        taken = [staging.take(staging.slot_bytes, torch.uint8) for _ in range(len(staging))]
        assert len({slot.data_ptr() for slot in taken}) == len(staging), where
    assert count > 500 // stride


def use(swapper: param_swapper.ParameterSwapper, params: list[Any]) -> None:
    """One pass: a large one is begun and used, and another is begun and not used."""
    small, large, other = params
    swapper.swap_in([small, large], async_op=True)
    swapper.swap_in([large], async_op=False)
    swapper.remove_partition_and_release_buffers([large])
    swapper.swap_in([large, other], async_op=True)
    swapper.swap_in([other], async_op=False)
    swapper.remove_partition_and_release_buffers([other])
    swapper.drop_unused()


def test_a_large_shard_moves_to_memory_of_deepspeeds() -> None:
    bench = Rank()
    (large,) = partitioned(bench, 1, 30_000)
    target = torch.zeros(30_001, dtype=torch.bfloat16)
    bench.param_swapper.swap_into_buffer(large, target[1:])
    assert torch.equal(target[1:], content_of((30_000,)))


# -- turns -----------------------------------------------------------------------------------------


def test_turns_take_half_of_the_budget_in_whole_pages() -> None:
    bench = Rank()
    params = partitioned(bench, 20, 10)
    turns = [[p.ds_id for p in turn] for turn in bench.param_swapper.turns(params)]
    assert turns == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


def test_a_turn_of_tiny_shards_is_read_at_once() -> None:
    bench = Rank()
    params = partitioned(bench, 8, 10)
    bench.store.tickets.clear()
    bench.store.in_flight_peak = 0
    bench.param_swapper.swap_in(params, async_op=False)
    assert bench.store.in_flight_peak == 8
