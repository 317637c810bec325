"""Wiring: what the runtime builds for a block, what stands in for a section that is off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memascend.resources.host
from memascend.base.interfaces import Device
from memascend.base.sizes import STAGING_SLOT_BYTES, STAGING_SLOT_COUNT
from memascend.base.streams import MASTER, PARAMETERS
from memascend.errors import StoreError
from memascend.memory.allocator import HostAllocator
from memascend.plan.derive import Plan, PlanRequest, derive
from memascend.runtime import Runtime, StockParts
from memascend.streaming.gradients.stream import GradientStream
from memascend.streaming.parameters.stream import ParameterStream
from tests.support.fake_cuda import FakeCuda, make_core
from tests.support.plan_models import decoder
from tests.support.small_runtime import build
from tests.support.streaming_hosts import HostTensors
from tests.support.tiled_training import tile_shape


def test_everything_on_a_shard_goes_to_the_drive_and_back(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    with runtime.lock:
        lease = runtime.pool.acquire(8000)
    assert lease is not None
    slot = lease.view(2000, torch.float32)
    slot.copy_(torch.arange(2000))
    runtime.io.write(key="a", source=slot, hold=lease.hold()).wait()
    slot.zero_()
    runtime.io.read(key="a", target=slot, hold=lease.hold()).wait()
    assert slot.tolist() == list(range(2000))
    assert runtime.memory.contains(slot)
    runtime.close()


def test_host_bytes_are_accounted_to_their_components(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    assert isinstance(runtime.arena, HostAllocator)
    with runtime.lock:
        lease = runtime.pool.acquire(1 << 20)
    components = runtime.arena.core.components()
    assert components["parameter slots"].live_bytes >= 1 << 20
    assert set(components) == {"bounce buffers", "parameter slots"}
    assert runtime.staging is runtime.staging
    components = runtime.arena.core.components()
    assert components["staging slots"].live_bytes == STAGING_SLOT_BYTES * STAGING_SLOT_COUNT
    assert lease is not None
    runtime.close()


def test_threads_of_ours_make_the_device_their_own_before_anything_else(tmp_path: Path) -> None:
    calls: list[str] = []
    runtime = build(
        tmp_path,
        block={"activations": {"enabled": True, "device_bytes": 0}},
        device=Device(use_here=lambda: calls.append(threading.current_thread().name)),
    )
    runtime.background.start([lambda reach: calls.append("a step")], {}, lambda: None)
    runtime.background.finish()
    saved = [runtime.activations.put(torch.zeros(1 << 10)) for _ in range(2)]
    runtime.activations.drain()
    assert calls[:2] == ["memascend-optimizer_0", "a step"]
    assert set(calls[2:]) == {"memascend-activations_0"}
    del saved
    runtime.background.close()
    runtime.close()


def test_pool_and_staging_slots_are_used_by_the_thread_that_holds_the_lock(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    gradient_stream = GradientStream(store=runtime.io, slots=runtime.staging)
    uses: tuple[Callable[[], object], ...] = (
        lambda: runtime.pool.acquire(8000),
        runtime.staging.wait_writes,
        gradient_stream.submit,
        ParameterStream(store=runtime.io, pool=runtime.pool).wait_reads,
    )
    for use in uses:
        with pytest.raises(AssertionError, match="without the runtime's lock"):
            use()
        with runtime.lock:
            use()
    runtime.close()


def test_parameters_keep_to_the_budget_given(tmp_path: Path) -> None:
    budget_bytes = 1 << 20
    runtime = build(tmp_path, parameter_budget_bytes=budget_bytes)
    assert "within 1.00 MiB" in runtime.describe()
    with runtime.lock:
        leases = [runtime.pool.acquire(budget_bytes // 4) for _ in range(5)]
    assert [lease is None for lease in leases] == [False] * 4 + [True]
    runtime.close()


@pytest.mark.parametrize(
    "block",
    [
        {"streaming": {"parameters": {"enabled": False}}},
        {"buffer_pool": {"enabled": False}},
    ],
    ids=str,
)
def test_without_parameter_streaming_the_pool_follows_the_model(
    tmp_path: Path, block: dict[str, Any]
) -> None:
    runtime = build(tmp_path, block=block)
    assert not runtime.pool.is_bounded
    with runtime.lock:
        assert runtime.pool.acquire(8000) is None
        runtime.pool.grow(8000)
        assert runtime.pool.acquire(8000) is not None
    runtime.close()


def test_within_a_budget_the_store_lends_to_the_one_stream_of_parameters(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    stream = runtime.parameters
    assert stream is runtime.parameters
    assert runtime.store is not None
    runtime.store.grant({PARAMETERS: 1 << 20}, memory=runtime.memory, component="resident cache")
    with runtime.lock:
        for nbytes, is_lent in ((4000, True), (2 << 20, False)):
            shard = stream.shard(f"param.{nbytes}", nbytes // 4, torch.float32)
            runtime.io.write(key=shard.key, source=torch.ones(shard.numel)).wait()
            stream.read_now([shard])
            assert shard.is_lent == is_lent
            assert shard.tensor is not None
            assert shard.tensor.tolist() == [1.0] * shard.numel
            stream.let_go(shard)
    runtime.close()


def test_without_a_budget_the_stream_of_parameters_needs_no_staging_slots(tmp_path: Path) -> None:
    runtime = build(tmp_path, block={"streaming": {"parameters": {"enabled": False}}})
    assert not runtime.parameters.pool.is_bounded
    assert runtime.arena is not None
    assert "staging slots" not in runtime.arena.core.components()
    runtime.close()


def test_closing_gives_the_drive_back_and_ends_io(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    runtime.io.write(key="a", source=torch.ones(10)).wait()
    runtime.close()
    runtime.close()
    with pytest.raises((StoreError, ValueError, RuntimeError)):
        runtime.io.read(key="a", target=torch.ones(10))
    assert list(tmp_path.iterdir()) == []


def test_two_runtimes_on_one_directory_do_not_see_each_other(tmp_path: Path) -> None:
    one, other = build(tmp_path), build(tmp_path)
    one.io.write(key="a", source=torch.ones(10)).wait()
    other.io.write(key="a", source=torch.zeros(10)).wait()
    target = torch.empty(10)
    one.io.read(key="a", target=target).wait()
    assert target.tolist() == [1.0] * 10
    other.close()
    one.io.read(key="a", target=target).wait()
    one.close()


def test_without_the_allocator_the_given_memory_serves(tmp_path: Path) -> None:
    memory = HostTensors()
    runtime = build(tmp_path, StockParts(memory=memory), block={"allocator": {"enabled": False}})
    assert runtime.arena is None
    assert runtime.memory is memory
    runtime.io.write(key="a", source=torch.ones(10)).wait()
    assert "pinned memory of the accelerator" in runtime.describe()
    runtime.close()


def test_without_direct_nvme_the_given_store_serves(tmp_path: Path) -> None:
    store: Any = object()
    runtime = build(tmp_path, StockParts(store=store), block={"direct_nvme": {"enabled": False}})
    assert runtime.store is None
    assert runtime.io is store
    assert "engine DeepSpeed aio" in runtime.describe()
    runtime.close()


def test_slots_lie_in_the_memory_that_a_stock_store_wants(tmp_path: Path) -> None:
    store: Any = object()
    stock = StockParts(store=store, slot_memory=HostTensors())
    runtime = build(tmp_path, stock, block={"direct_nvme": {"enabled": False}})
    assert runtime.arena is not None
    with runtime.lock:
        assert runtime.pool.grow(8000)
        assert runtime.pool.acquire(8000) is not None
    assert runtime.arena.core.components() == {}
    runtime.close()


def test_a_section_that_is_off_needs_something_instead(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="allocator is off"):
        build(tmp_path, block={"allocator": {"enabled": False}})
    runtime = build(tmp_path, block={"direct_nvme": {"enabled": False}})
    with pytest.raises(AssertionError, match="direct_nvme is off"):
        runtime.io  # noqa: B018  the access itself is the test
    with pytest.raises(AssertionError, match="direct_nvme is off"):
        runtime.staging  # noqa: B018


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_the_overflow_check_sees_what_is_not_finite(tmp_path: Path, bad: float) -> None:
    runtime = build(tmp_path)
    assert runtime.overflow_check is not None
    gradients = torch.zeros(10_001)
    assert not runtime.overflow_check(gradients)
    gradients[-1] = bad
    assert runtime.overflow_check(gradients)
    runtime.close()


def test_without_the_overflow_check_there_is_none(tmp_path: Path) -> None:
    runtime = build(tmp_path, block={"overflow_check": {"enabled": False}})
    assert runtime.overflow_check is None
    runtime.close()


def test_describing_says_what_was_really_obtained(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    text = runtime.describe()
    assert "engine threads" in text
    assert "0 % page-locked" in text
    runtime.close()


# -- the resident cache ----------------------------------------------------------------------------


def plan_with(room_bytes: int, drive_count: int = 1) -> Plan:
    """The plan of a small model under the limit of its defaults and so much more."""
    shapes, request = decoder(), PlanRequest(drive_count=drive_count)
    default_bytes = derive(shapes, request=request).host_bytes
    return derive(shapes, request=request, limit_bytes=default_bytes + room_bytes)


def take_tiles(runtime: Runtime, plan: Plan) -> list[torch.Tensor]:
    """What whoever makes the optimizer takes after `adopt`."""
    names = ("optimizer tiles", "optimizer scratch")
    return [runtime.memory.tensor(plan.host[n], torch.uint8, component=n) for n in names]


@pytest.mark.parametrize("drive_count", [1, 8])
@pytest.mark.parametrize("room_bytes", [0, 4096, 5_000_000, 40 << 20, 1 << 30])
def test_adopting_a_plan_takes_what_is_planned_and_no_more(
    tmp_path: Path, room_bytes: int, drive_count: int
) -> None:
    plan = plan_with(room_bytes, drive_count)
    assert plan.limit_bytes is not None
    limit_bytes = min(plan.limit_bytes, plan.host_bytes)
    sizes = {"parameter_budget_bytes": 1 << 20, "staging_slot_bytes": 1 << 20}
    runtime = build(tmp_path, limit_bytes=limit_bytes, **sizes)
    runtime.io.write(key="param.0", source=torch.arange(3000)).wait()
    runtime.adopt(plan)
    tiles = take_tiles(runtime, plan)
    ledger = runtime.ledger()
    live = {row.component: row.live_bytes for row in ledger.rows}
    assert live == {name: nbytes for name, nbytes in plan.host.items() if nbytes}
    assert all(row.planned_bytes == row.live_bytes for row in ledger.rows)
    assert ledger.held_bytes_peak <= limit_bytes
    target = torch.empty(3000, dtype=torch.int64)
    runtime.io.read(key="param.0", target=target).wait()
    assert torch.equal(target, torch.arange(3000))
    assert len(tiles) == 2
    runtime.close()


@pytest.mark.parametrize("is_first", [True, False])
def test_reading_ahead_follows_the_drives_of_the_plan(tmp_path: Path, is_first: bool) -> None:
    runtime = build(tmp_path)
    if not is_first:
        assert runtime.parameters._prefetch_limit.drive_count == 1
    plan = plan_with(0, drive_count=8)
    runtime.adopt(plan)
    assert runtime.parameters._prefetch_limit.drive_count == plan.drive_count == 8
    runtime.close()


@pytest.mark.parametrize("room_bytes", [0, 4096, 5_000_000, 40 << 20, 1 << 30])
def test_adopting_a_plan_fits_registered_memory_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    cuda = FakeCuda(tmp_path)

    class RegisteringAllocator(HostAllocator):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.core = make_core(cuda, limit_bytes=options["limit_bytes"])

    plan = plan_with(room_bytes)
    assert plan.limit_bytes is not None
    limit_bytes = min(plan.limit_bytes, plan.host_bytes)
    monkeypatch.setattr(memascend.resources.host, "HostAllocator", RegisteringAllocator)
    sizes = {"parameter_budget_bytes": 1 << 20, "staging_slot_bytes": 1 << 20}
    runtime = build(tmp_path, limit_bytes=limit_bytes, **sizes)
    runtime.io.write(key="param.0", source=torch.arange(3000)).wait()
    with runtime.lock:
        for nbytes in (100_000, 4096, 200_000, 30_000):
            assert runtime.pool.acquire(nbytes) is not None  # given back at once
    assert runtime.staging is not None
    runtime.adopt(plan)
    tiles = take_tiles(runtime, plan)
    assert len(tiles) == 2
    live = {row.component: row.live_bytes for row in runtime.ledger().rows}
    assert live == {name: nbytes for name, nbytes in plan.host.items() if nbytes}
    assert sum(map(len, cuda.registrations())) == runtime.ledger().held_bytes
    runtime.close()


def test_what_is_resident_does_not_reach_the_drive(tmp_path: Path) -> None:
    plan = plan_with(1 << 30)
    runtime = build(tmp_path, limit_bytes=plan.limit_bytes)
    assert runtime.store is not None
    runtime.io.write(key="param.0", source=torch.ones(100_000)).wait()
    runtime.adopt(plan)
    before = runtime.store.stats()
    for key in ("param.0", "gradient.0_1.0.0", "master.0_1", "state.0_1.exp_avg"):
        runtime.io.write(key=key, source=torch.ones(1000)).wait()
    after = runtime.ledger().drive
    assert after["bytes_written"] == before["bytes_written"]
    assert after["resident_bytes_written"] == 4 * 4000
    assert after[f"resident_bytes_written.{MASTER}"] == 4000
    runtime.close()


def test_a_plan_adopted_again_keeps_keys_and_another_moves_them(tmp_path: Path) -> None:
    runtime = build(tmp_path)
    assert runtime.store is not None
    runtime.io.write(key="param.0", source=torch.arange(1_000_000)).wait()
    target = torch.empty(1_000_000, dtype=torch.int64)
    for room_bytes in (1 << 30, 1 << 30, 5_000_000, 0, 10 << 20):
        plan = plan_with(room_bytes)
        runtime.adopt(plan)
        assert sum(runtime.store.granted.values()) == plan.host["resident cache"]
        runtime.io.read(key="param.0", target=target).wait()
        assert torch.equal(target, torch.arange(1_000_000))
    runtime.close()


def test_the_streams_of_the_optimizer_are_built_once_and_given_back(tmp_path: Path) -> None:
    waits: list[str] = []
    runtime = build(tmp_path, device=Device(wait_idle=lambda: waits.append("idle")))
    assert runtime.arena is not None
    for stream in ("gradients", "optimizer"):
        with pytest.raises(AssertionError, match="is not open"):
            getattr(runtime, stream)
    assert runtime.open_gradients(None) is runtime.gradients
    assert runtime.open_optimizer(tile_shape()) is runtime.optimizer
    with runtime.lock:
        runtime.gradients.put("7_9", 0, torch.ones(10))
    runtime.optimizer.groups.create("7_9", 10, [])
    assert runtime.arena.core.components()["optimizer tiles"].live_bytes > 0
    tiles = runtime.optimizer.tiles
    taken = [tiles.take("7_9", 0, 10) for _ in range(tiles.shape.count)]
    taken.clear()  # as Ctrl-C does: copies to the device may be in flight
    assert tiles.has_idle()
    assert waits == ["idle"]
    del tiles
    runtime.optimizer.groups.discard()
    runtime.close_optimizer()
    assert runtime.arena.core.components()["optimizer tiles"].live_bytes == 0
    assert runtime.store is not None
    assert not list(runtime.store.keys())
    runtime.close_optimizer()
    runtime.close()
