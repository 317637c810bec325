"""DeepSpeed's aio_handle surface over our store, as its swappers use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from memascend.deepspeed.stock.aio_handle import AioHandle, serving, wrap_builder
from memascend.errors import StoreError
from memascend.memory.allocator import HostAllocator
from memascend.nvme.store import MemoryFaults, TensorStore
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory
from tests.support.streaming_fakes import FakeStore

NUMEL = 3000


@pytest.fixture
def faults() -> MemoryFaults:
    return MemoryFaults()


@pytest.fixture
def store(faults: MemoryFaults) -> Iterator[TensorStore]:
    with TensorStore(
        volumes=["(memory)"], bounce=PageMemory(BOUNCE_BYTES).tensor, engine="memory", faults=faults
    ) as opened:
        yield opened
        faults.paused = False


@pytest.fixture
def memory() -> HostAllocator:
    return HostAllocator(huge_pages="off", lock=False)


@pytest.fixture
def handle(store: TensorStore, memory: HostAllocator) -> AioHandle:
    return AioHandle(store=store, memory=memory, component="optimizer buffers")


def test_waiting_gives_the_number_of_transfers_since_the_last_wait(handle: AioHandle) -> None:
    assert handle.wait() == 0
    for index in range(3):
        assert handle.async_pwrite(torch.full((NUMEL,), float(index)), f"/drive/{index}") == 0
    assert handle.wait() == 3
    assert handle.wait() == 0
    targets = [torch.empty(NUMEL) for _ in range(3)]
    for index, target in enumerate(targets):
        assert handle.async_pread(target, f"/drive/{index}") == 0
    assert handle.wait() == 3
    assert [target.unique().tolist() for target in targets] == [[0.0], [1.0], [2.0]]


def test_a_read_starts_at_its_byte_of_the_key(handle: AioHandle) -> None:
    handle.async_pwrite(torch.arange(NUMEL, dtype=torch.float32), "/drive/a")
    handle.wait()
    target = torch.empty(5)
    handle.async_pread(target, "/drive/a", 4 * 100)
    handle.wait()
    assert target.tolist() == [100.0, 101.0, 102.0, 103.0, 104.0]


def test_a_write_at_an_offset_changes_nothing_else(handle: AioHandle) -> None:
    handle.async_pwrite(torch.zeros(NUMEL), "/drive/a")
    handle.wait()
    handle.async_pwrite(torch.ones(2), "/drive/a", 4 * 1025)
    handle.wait()
    target = torch.empty(NUMEL)
    handle.async_pread(target, "/drive/a")
    handle.wait()
    assert target.nonzero().flatten().tolist() == [1025, 1026]


def test_two_handles_see_each_others_keys(
    handle: AioHandle, store: TensorStore, memory: HostAllocator
) -> None:
    """DeepSpeed has one handle per direction; their counts are their own."""
    other = AioHandle(store=store, memory=memory, component="x")
    handle.async_pwrite(torch.ones(NUMEL), "/drive/a")
    target = torch.zeros(NUMEL)
    other.async_pread(target, "/drive/a")
    assert other.wait() == 1
    assert target.unique().tolist() == [1.0]
    assert handle.wait() == 1


def test_no_file_is_made(handle: AioHandle, tmp_path) -> None:
    handle.async_pwrite(torch.ones(NUMEL), str(tmp_path / "key"))
    handle.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_first_error_is_raised_after_everything_was_waited_for(
    memory: HostAllocator,
) -> None:
    store = FakeStore()
    store.failing |= {("read", "b"), ("read", "c")}
    handle = AioHandle(store=store, memory=memory, component="x")
    for key in "abcd":
        store.reserve(key=key, nbytes=4)
        handle.async_pread(torch.empty(1), key)
    with pytest.raises(StoreError, match="b failed"):
        handle.wait()
    assert all(ticket.finished for ticket in store.tickets)
    assert handle.wait() == 0


def test_a_transfer_whose_wait_ctrl_c_ended_is_waited_for_by_the_next(
    memory: HostAllocator,
) -> None:
    store = FakeStore()
    handle = AioHandle(store=store, memory=memory, component="x")
    store.reserve(key="a", nbytes=4)
    handle.async_pread(torch.empty(1), "a")
    store.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    store.interrupts = False
    assert handle.wait() == 1
    assert all(ticket.finished for ticket in store.tickets)


def test_a_key_that_was_never_written_is_an_error_at_once(handle: AioHandle) -> None:
    with pytest.raises(StoreError, match="/drive/missing"):
        handle.async_pread(torch.empty(4), "/drive/missing")
    assert handle.wait() == 0


# -- memory and settings -------------------------------------------------------------------------


def test_locked_tensors_are_exact_and_known(handle: AioHandle, memory: HostAllocator) -> None:
    tensor = handle.new_cpu_locked_tensor(NUMEL, torch.empty(0, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype) == ((NUMEL,), torch.bfloat16)
    assert handle.is_pinned(tensor)
    assert handle.is_pinned(tensor[10:20])
    assert not handle.is_pinned(torch.empty(NUMEL))
    assert handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(torch.empty(NUMEL))
    assert memory.core.components()["optimizer buffers"].live_bytes >= NUMEL * 2
    del tensor
    assert memory.core.components()["optimizer buffers"].live_bytes == 0


# -- the builder ---------------------------------------------------------------------------------


class StockBuilder:
    """Stands for DeepSpeed's AsyncIOBuilder."""


def test_outside_serving_the_builder_is_stock() -> None:
    assert isinstance(wrap_builder(StockBuilder)(), StockBuilder)


def test_inside_serving_handles_are_ours_and_afterwards_stock_again(
    store: TensorStore, memory: HostAllocator
) -> None:
    build = wrap_builder(StockBuilder)
    with serving(store=store, memory=memory, component="parameter buffers"):
        module = build().load(verbose=False)
        handle = module.aio_handle(block_size=4096, queue_depth=3)
    assert isinstance(handle, AioHandle)
    handle.async_pwrite(torch.ones(NUMEL), "/drive/a")
    assert handle.wait() == 1
    assert isinstance(build(), StockBuilder)


def test_serving_nests_and_ends_with_an_exception(
    store: TensorStore, memory: HostAllocator
) -> None:
    build = wrap_builder(StockBuilder)
    with serving(store=store, memory=memory, component="outer"):
        with (
            pytest.raises(RuntimeError),
            serving(store=store, memory=memory, component="inner"),
        ):
            raise RuntimeError
        assert not isinstance(build(), StockBuilder)
    assert isinstance(build(), StockBuilder)
