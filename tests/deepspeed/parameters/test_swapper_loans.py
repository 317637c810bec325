"""Parameters that stay in memory, under DeepSpeed's own code: gathered, changed, never aliased."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.streaming_hosts import HostTensors, memory_store

pytest.importorskip("deepspeed")

from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from memascend.base.units import PAGE_BYTES
from memascend.nvme.resident import ResidentStore
from tests.support.partitioned_parameters import BUDGET_BYTES, Rank, content_of
from tests.support.swapped_parameters import on_device

SMALL, LARGE = (64, 30), (300, 101)  # the second has no slot
ABSENT, THERE = PartitionedParamStatus.NOT_AVAILABLE, PartitionedParamStatus.AVAILABLE
by_shape = pytest.mark.parametrize("shape", [SMALL, LARGE], ids=str)


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed asks for its rank only to know whether to print."""
    monkeypatch.setattr(partition_parameters, "print_rank_0", lambda *_, **__: None)


@pytest.fixture
def resident() -> Iterator[ResidentStore]:
    store = ResidentStore(memory_store(), stream_of=lambda key: "parameters")
    store.grant({"parameters": BUDGET_BYTES}, memory=HostTensors(), component="resident")
    yield store
    store.close()


def partitioned(bench: Rank, shape: tuple[int, ...]) -> tuple[Any, torch.Tensor]:
    content = content_of(shape)
    param = bench.parameter(content)
    bench.partition(param)
    return param, content


def stored(bench: Rank, param: Any) -> torch.Tensor:
    target = torch.empty(param.ds_tensor.ds_numel, dtype=param.dtype)
    bench.store.read(key=f"param.{param.ds_id}", target=target).wait()
    return target


def memory_of(bench: Rank, param: Any) -> int:
    key = f"param.{param.ds_id}"
    address = bench.store.lend(key=key, dtype=param.dtype).data_ptr()
    bench.store.take_back(key=key)
    return int(address)


@by_shape
def test_one_that_is_gathered_over_one_rank_has_memory_of_its_own(
    resident: ResidentStore, shape: tuple[int, ...]
) -> None:
    """On the CPU a gather takes what it is given for the parameter."""
    bench = Rank(resident=resident)
    param, content = partitioned(bench, shape)
    free_bytes = bench.pool.free_bytes
    bench.param_swapper.swap_in([param], async_op=False)
    assert param.ds_tensor.data_ptr() == memory_of(bench, param)
    assert bench.pool.free_bytes == free_bytes  # no slot
    bench.param_swapper.remove_partition_and_release_buffers([param])
    bench.gather(param)
    assert param.ds_tensor.status is ABSENT
    bench.param_swapper.drop_unused()
    # A step of the optimizer, while somebody keeps the parameter.
    resident.write(key=f"param.{param.ds_id}", source=content.view(-1) * 2, offset_bytes=0).wait()
    assert torch.equal(param.data, content)
    param.data.mul_(3)
    assert torch.equal(stored(bench, param), content.view(-1) * 2)
    bench.partition(param, updated=True)
    assert torch.equal(stored(bench, param), content.view(-1) * 3)


@by_shape
def test_one_that_is_changed_while_it_is_lent_is_partitioned_elsewhere(
    resident: ResidentStore, shape: tuple[int, ...]
) -> None:
    """On the CPU a collective of several ranks keeps the loan until it was waited for."""
    bench = Rank(0, 2, resident=resident)
    param, content = partitioned(bench, shape)
    before = stored(bench, param)
    bench.param_swapper.swap_in([param], async_op=False)
    param.ds_status = ZeroParamStatus.INFLIGHT
    bench.param_swapper.after_gather([param])
    assert (param.ds_tensor.status, param.ds_tensor.data_ptr()) == (THERE, memory_of(bench, param))
    param.data, param.ds_status = content * 2, ZeroParamStatus.AVAILABLE
    bench.param_swapper.stage_for_update(param)
    assert param.ds_tensor.data_ptr() != memory_of(bench, param)
    assert torch.equal(stored(bench, param), before)
    bench.partition(param, updated=True)
    assert torch.equal(stored(bench, param), before * 2)
    assert param.ds_tensor.status is ABSENT


def test_on_a_device_a_step_waits_for_copies_out_of_the_memory(
    resident: ResidentStore,
) -> None:
    bench = Rank(0, 2, resident=resident)
    events = on_device(bench.param_swapper)
    params = [partitioned(bench, SMALL)[0] for _ in range(3)]
    bench.param_swapper.swap_in(params, async_op=False)
    bench.param_swapper.after_gather(params)
    assert [param.ds_tensor.status for param in params] == [ABSENT] * 3
    with pytest.raises(ValueError, match=r"param\.0.* is lent"):
        resident.discard(key="param.0")
    assert not any(event.passed for event in events)
    bench.param_swapper.drop_unused()
    assert all(event.passed for event in events)
    for param in params:
        resident.write(key=f"param.{param.ds_id}", source=content_of(SMALL, 7)[:32]).wait()


def test_what_is_too_large_for_the_memory_is_read_in_part_as_before() -> None:
    store = ResidentStore(memory_store(), stream_of=lambda key: "parameters")
    store.grant({"parameters": PAGE_BYTES}, memory=HostTensors(), component="resident")
    bench = Rank(resident=store)
    param, content = partitioned(bench, (100, 50))
    bench.param_swapper.swap_in([param], async_op=False)
    assert torch.equal(param.ds_tensor.data, content.view(-1))
    param.ds_tensor.data.zero_()
    assert torch.equal(stored(bench, param), content.view(-1))
    store.close()
