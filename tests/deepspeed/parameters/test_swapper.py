"""DeepSpeed's parameter swapper surface over our path, driven as zero.Init drives it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.streaming_fakes import CountedPool, FakeStore

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    PartitionedParamStatus,
)
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.deepspeed.parameters.swapper import TURN_BYTES, ParameterSwapper
from memascend.errors import StoreError, TornStepError
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.swapped_parameters import NUMEL, on_device, parameter

ABSENT = PartitionedParamStatus.NOT_AVAILABLE
READING = PartitionedParamStatus.INFLIGHT
THERE = PartitionedParamStatus.AVAILABLE


class Bench:
    """A swapper with everything below it in the hands of the test."""

    def __init__(self, *, prefetch_bytes: int | None = None) -> None:
        self.store = FakeStore()
        self.pool = CountedPool()
        stream = ParameterStream(store=self.store, pool=self.pool, prefetch_bytes=prefetch_bytes)
        self.swapper = ParameterSwapper(
            attachment=SimpleNamespace(),  # type: ignore[arg-type]
            stream=stream,
            dtype=torch.bfloat16,
        )
        self.params: list[Any] = []

    def partitioned(self, count: int, numel: int = NUMEL) -> list[Any]:
        """Parameters whose shards were stored; number i is filled with i + 1."""
        for index in range(count):
            param = parameter(len(self.params), numel, swapper=self.swapper)
            buffer = self.swapper.get_buffer(param, numel)
            buffer.fill_(index + 1)
            param.ds_tensor.data = buffer.data
            param.ds_tensor.status = THERE
            self.swapper.swap_out_and_release([param])
            self.params.append(param)
        self.store.tickets.clear()
        return self.params[-count:]

    def reads(self) -> list[str]:
        return [key for kind, key in self.store.log() if kind == "read"]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def statuses(params: list[Any]) -> list[PartitionedParamStatus]:
    return [param.ds_tensor.status for param in params]


def value(tensor: torch.Tensor) -> float:
    assert tensor.unique().numel() == 1
    return float(tensor[0])


# -- partitioning and reading --------------------------------------------------------------------


def test_a_partitioned_shard_is_stored_and_holds_no_memory(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    assert value(bench.store.value("param.0", torch.bfloat16)) == 1.0
    assert param.ds_tensor.status is ABSENT
    assert param.ds_tensor.data.dim() == 0
    assert bench.pool.free_count == bench.pool.slot_count


def test_ds_tensor_stays_one_object_through_a_round_trip(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    before = param.ds_tensor
    bench.swapper.swap_in([param], async_op=False)
    assert param.ds_tensor is before
    assert param.ds_tensor.status is THERE
    assert value(param.ds_tensor.data) == 1.0
    bench.swapper.remove_partition_and_release_buffers([param])
    assert param.ds_tensor is before


def test_a_parameter_named_twice_is_read_once(bench: Bench) -> None:
    one, other = bench.partitioned(2)
    bench.swapper.swap_in([one, other, one, one], async_op=True)
    assert bench.reads() == ["param.0", "param.1"]
    bench.swapper.synchronize_reads()
    assert statuses([one, other]) == [THERE, THERE]


def test_what_is_on_its_way_is_not_asked_for_again(bench: Bench) -> None:
    one, other = bench.partitioned(2)
    bench.swapper.swap_in([one], async_op=True)
    assert one.ds_tensor.status is READING
    bench.swapper.swap_in([one, other], async_op=False)
    assert bench.reads() == ["param.0", "param.1"]
    assert [value(p.ds_tensor.data) for p in (one, other)] == [1.0, 2.0]


def test_what_is_gathered_is_not_read(bench: Bench) -> None:
    one, other = bench.partitioned(2)
    one.ds_status = ZeroParamStatus.AVAILABLE
    bench.swapper.swap_in([one, other], async_op=False)
    assert bench.reads() == ["param.1"]


def test_a_prefetch_list_beyond_the_limit_is_served_in_part_and_in_order() -> None:
    bench = Bench(prefetch_bytes=3 * NUMEL * 2)  # a shard is a page
    params = bench.partitioned(8)
    bench.swapper.swap_in(params, async_op=True)
    assert bench.reads() == ["param.0", "param.1", "param.2"]
    assert statuses(params) == [READING] * 3 + [ABSENT] * 5


def test_what_is_needed_now_is_read_whatever_the_limit() -> None:
    bench = Bench(prefetch_bytes=0)
    params = bench.partitioned(8)
    bench.swapper.swap_in(params, async_op=True)
    assert bench.reads() == []
    bench.swapper.swap_in(params, async_op=False)
    assert statuses(params) == [THERE] * 8


def test_an_updated_shard_is_written_before_it_is_read_again(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    bench.swapper.swap_out_partitioned_params([param], [torch.full((NUMEL,), 5.0)])
    bench.swapper.swap_in([param], async_op=False)
    assert bench.store.log() == [("write", "param.0"), ("read", "param.0")]
    assert value(param.ds_tensor.data) == 5.0
    bench.swapper.synchronize_writes()


def test_updating_a_shard_that_was_read_ahead_drops_the_old_copy(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    bench.swapper.swap_in([param], async_op=True)
    bench.swapper.swap_out_partitioned_params([param], [torch.full((NUMEL,), 5.0)])
    bench.swapper.synchronize_reads()
    assert param.ds_tensor.status is ABSENT
    bench.swapper.swap_in([param], async_op=False)
    assert value(param.ds_tensor.data) == 5.0


def test_an_update_needs_as_many_sources_as_parameters(bench: Bench) -> None:
    params = bench.partitioned(2)
    with pytest.raises(ValueError, match="shorter"):
        bench.swapper.swap_out_partitioned_params(params, [torch.zeros(NUMEL)])


def test_reading_into_a_buffer_fills_the_shards_elements_alone(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    target = torch.zeros(NUMEL + 8, dtype=torch.bfloat16)
    bench.swapper.swap_into_buffer(param, target)
    assert value(target[:NUMEL]) == 1.0
    assert value(target[NUMEL:]) == 0.0


def test_which_shards_live_on_the_drive_depends_on_their_bytes(bench: Bench) -> None:
    at_limit = (1 << 20) // 2
    assert bench.swapper.swappable_tensor(numel=at_limit)
    assert not bench.swapper.swappable_tensor(numel=at_limit - 1)
    assert bench.swapper.swappable_tensor(param=parameter(9, at_limit))
    with pytest.raises(ValueError, match="either"):
        bench.swapper.swappable_tensor()
    with pytest.raises(ValueError, match="either"):
        bench.swapper.swappable_tensor(param=parameter(9), numel=1)


# -- failures ------------------------------------------------------------------------------------


def test_a_failing_read_leaves_nothing_half_there_and_can_be_tried_again(bench: Bench) -> None:
    params = bench.partitioned(3)
    bench.store.failing.add(("read", "param.1"))
    with pytest.raises(StoreError, match=r"read of param\.1"):
        bench.swapper.swap_in(params, async_op=False)
    assert READING not in statuses(params)
    bench.store.failing.clear()
    bench.swapper.swap_in(params, async_op=False)
    assert statuses(params) == [THERE] * 3
    assert [value(p.ds_tensor.data) for p in params] == [1.0, 2.0, 3.0]


def test_of_several_failing_reads_the_first_is_raised_and_all_let_go(bench: Bench) -> None:
    params = bench.partitioned(4)
    bench.store.failing |= {("read", "param.1"), ("read", "param.2"), ("read", "param.3")}
    with pytest.raises(StoreError, match=r"read of param\.1"):
        bench.swapper.swap_in(params, async_op=False)
    assert statuses(params) == [ABSENT] * 4
    bench.store.failing.clear()
    bench.swapper.swap_in(params, async_op=False)
    assert [value(p.ds_tensor.data) for p in params] == [1.0, 2.0, 3.0, 4.0]


def test_a_failing_write_back_is_reported_at_the_end_of_the_step(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    bench.store.failing.add(("write", "param.0"))
    bench.swapper.swap_out_partitioned_params([param], [torch.zeros(NUMEL)])
    with pytest.raises(StoreError, match=r"write of param\.0"):
        bench.swapper.synchronize_writes()


# -- letting go ----------------------------------------------------------------------------------


def test_letting_go_twice_is_harmless(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    bench.swapper.swap_in([param], async_op=False)
    for _ in range(2):
        bench.swapper.remove_partition_and_release_buffers([param])
    assert param.ds_tensor.status is ABSENT
    assert bench.pool.free_count == bench.pool.slot_count == 1


def test_before_a_step_unused_copies_are_dropped(bench: Bench) -> None:
    params = bench.partitioned(3)
    bench.swapper.swap_in(params[:1], async_op=False)
    bench.swapper.swap_in(params[1:], async_op=True)
    bench.swapper.drop_unused()
    assert statuses(params) == [ABSENT] * 3
    assert bench.pool.free_count == bench.pool.slot_count


# -- after a gather ------------------------------------------------------------------------------


def test_on_a_device_slots_wait_for_one_event_behind_the_copies(
    bench: Bench,
) -> None:
    events = on_device(bench.swapper)
    params = bench.partitioned(2)
    bench.swapper.swap_in(params, async_op=False)
    free_before = bench.pool.free_count
    bench.swapper.after_gather(params)
    (event,) = events
    assert event.recorded
    assert statuses(params) == [ABSENT, ABSENT]
    assert bench.pool.free_count == free_before
    # Needing a slot, the next read waits for the event instead of taking more memory.
    slot_count = bench.pool.slot_count
    bench.swapper.swap_in(params, async_op=False)
    assert event.wait_count == 1
    assert bench.pool.slot_count == slot_count
    assert [value(p.ds_tensor.data) for p in params] == [1.0, 2.0]


def test_on_a_device_parameters_kept_in_memory_make_no_event(
    bench: Bench,
) -> None:
    events = on_device(bench.swapper)
    bench.swapper.after_gather([parameter(50, location="cpu")])
    assert events == []


def test_an_alias_of_the_slot_becomes_a_copy(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    bench.swapper.swap_in([param], async_op=False)
    param.data = param.ds_tensor.data.view(-1)
    param.ds_status = ZeroParamStatus.INFLIGHT
    slot = param.ds_tensor.data
    bench.swapper.after_gather([param])
    slot.fill_(-9)
    assert value(param.data) == 1.0
    assert param.ds_tensor.status is ABSENT


def test_a_slot_in_a_collective_is_kept_until_that_is_over(
    bench: Bench,
) -> None:
    one, other = bench.partitioned(2)
    bench.swapper.swap_in([one], async_op=False)
    one.ds_status = ZeroParamStatus.INFLIGHT
    one.data = torch.zeros(2 * NUMEL)
    bench.swapper.after_gather([one])
    bench.swapper.remove_partition_and_release_buffers([one])
    assert one.ds_tensor.status is THERE
    one.ds_status = ZeroParamStatus.AVAILABLE
    slot_count = bench.pool.slot_count
    bench.swapper.swap_in([other], async_op=False)
    assert one.ds_tensor.status is ABSENT
    assert bench.pool.slot_count == slot_count


def test_a_modified_parameter_gets_a_slot_to_be_partitioned_into(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    bench.swapper.stage_for_update(param)
    param.ds_tensor.data.fill_(8)
    bench.swapper.stage_for_update(param)
    bench.swapper.swap_out_and_release([param])
    assert value(bench.store.value("param.0", torch.bfloat16)) == 8.0


def test_an_optimizer_hears_of_a_change_before_it_is_stored_and_may_refuse_it(
    bench: Bench,
) -> None:
    (param,) = bench.partitioned(1)
    heard: list[tuple[Any, float]] = []
    is_fixed = [True]

    def before(keys: Any) -> None:
        heard.append(([*keys], value(bench.store.value("param.0", torch.bfloat16))))
        assert not bench.swapper.lock._is_owned()  # another thread may wait for it
        if len(heard) == 1:
            raise StoreError(5, "the last step failed")

    bench.swapper.watch_changes(before, lambda key: is_fixed[0])
    for error in (StoreError, AssertionError):
        bench.swapper.stage_for_update(param)
        param.ds_tensor.data.fill_(8)
        with pytest.raises(error, match=r"the last step failed|param\.0 changes, and its master"):
            bench.swapper.swap_out_and_release([param])
        assert param.ds_tensor.status is ABSENT
        bench.swapper.swap_in([param], async_op=False)
        assert value(param.ds_tensor.data) == 1.0, "what is stored"
    is_fixed[0] = False
    bench.swapper.stage_for_update(param)
    param.ds_tensor.data.fill_(8)
    bench.swapper.swap_out_and_release([param])
    assert value(bench.store.value("param.0", torch.bfloat16)) == 8.0
    assert heard == [(["param.0"], 1.0)] * 3


def test_an_optimizer_may_refuse_a_gather(bench: Bench) -> None:
    (param,) = bench.partitioned(1)
    bench.swapper.wait_for_updates([param])

    def refuse() -> None:
        assert not bench.swapper.lock._is_owned()
        raise TornStepError("half of a step")

    bench.swapper.watch_gathers(refuse)
    with pytest.raises(TornStepError, match="half of a step"):
        bench.swapper.wait_for_updates([param])


# -- what is no shard of this swapper ------------------------------------------------------------


def test_a_parameter_of_another_model_is_named(bench: Bench) -> None:
    (param,) = Bench().partitioned(1)
    with pytest.raises(StoreError, match=r"'param\.0' belongs to another model") as caught:
        bench.swapper.swap_in([param], async_op=False)
    assert caught.value.key == "param.0"
    assert bench.store.log() == []


def test_of_a_prefetch_list_its_own_parameters_are_read_ahead(bench: Bench) -> None:
    mine, others = bench.partitioned(1), Bench().partitioned(2)
    bench.swapper.swap_in([*others, *mine], async_op=True)
    assert statuses([*others, *mine]) == [ABSENT, ABSENT, READING]


@pytest.mark.parametrize("when", ["gather", "step"])
def test_a_write_to_an_absent_shard_is_an_error_at_the_next_gather_or_step(
    bench: Bench, when: str
) -> None:
    written, other = bench.partitioned(2)
    written.ds_tensor.data.fill_(5)
    gather = functools.partial(bench.swapper.swap_in, [other], async_op=False)
    with pytest.raises(StoreError, match="is lost"):
        (gather if when == "gather" else bench.swapper.drop_unused)()
    bench.swapper.swap_in([written], async_op=False)
    assert value(written.ds_tensor) == 1.0


# -- turns ---------------------------------------------------------------------------------------


def cut(bench: Bench, sizes: list[tuple[int, str]], first_id: int = 0) -> list[list[int]]:
    params = [
        parameter(number, nbytes // 2, location, bench.swapper)
        for number, (nbytes, location) in enumerate(sizes, start=first_id)
    ]
    return [[param.ds_id for param in turn] for turn in bench.swapper.turns(params)]


@pytest.mark.parametrize(
    ("sizes", "turns"),
    [
        ([], []),
        ([(TURN_BYTES, "nvme")], [[0]]),
        ([(TURN_BYTES // 2, "nvme")] * 4, [[0, 1], [2, 3]]),
        ([(TURN_BYTES // 2, "nvme"), (TURN_BYTES // 2 + 2, "nvme")], [[0], [1]]),
        ([(3 * TURN_BYTES, "nvme")] * 2, [[0], [1]]),
        ([(TURN_BYTES, "nvme"), (3 * TURN_BYTES, "cpu"), (2, "nvme")], [[0, 1], [2]]),
    ],
)
def test_a_list_is_cut_into_turns_by_bytes_on_the_drive(
    bench: Bench, sizes: list[tuple[int, str]], turns: list[list[int]]
) -> None:
    assert cut(bench, sizes) == turns


def test_turns_do_not_depend_on_the_order_of_the_list(bench: Bench) -> None:
    """DeepSpeed hands over sets, whose order differs from rank to rank."""
    sizes = [TURN_BYTES // 2, TURN_BYTES // 3, TURN_BYTES // 2, 2]
    params = [parameter(i, nbytes // 2, swapper=bench.swapper) for i, nbytes in enumerate(sizes)]
    cuts = [list(bench.swapper.turns(order)) for order in (params, params[::-1])]
    assert [[p.ds_id for p in turn] for turn in cuts[0]] == [[0, 1], [2, 3]]
    assert cuts[0] == cuts[1]


def test_turns_do_not_depend_on_what_this_rank_has_in_memory(bench: Bench) -> None:
    """Every rank must cut in the same places, or their collectives would not match."""
    sizes = [(TURN_BYTES // 3, "nvme")] * 7
    expected = cut(bench, sizes)
    busy = Bench(prefetch_bytes=0)
    busy.swapper.swap_in(busy.partitioned(3), async_op=False)
    assert cut(busy, sizes, first_id=3) == [[number + 3 for number in turn] for turn in expected]
