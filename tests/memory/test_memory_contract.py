"""Every host memory behind `HostMemory` does the same: the arena, torch's, stock's, the tests'."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memascend.memory.allocator import HostAllocator
from tests.support.streaming_fakes import FakeMemory
from tests.support.streaming_hosts import HostTensors


def stock_pinned() -> Any:
    pytest.importorskip("deepspeed")
    from memascend.deepspeed.stock.memory import PinnedMemory

    return PinnedMemory()


def stock_locked() -> Any:
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    if not builders.AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io op needs libaio")
    from memascend.deepspeed.stock.memory import LockedMemory

    return LockedMemory(builders.AsyncIOBuilder().load(verbose=False).aio_handle())


MEMORIES: dict[str, Callable[[], Any]] = {
    "arena": lambda: HostAllocator(huge_pages="off", lock=False),
    "torch's pinned": stock_pinned,
    "stock's locked": stock_locked,
    "of tests": HostTensors,
    "fake": FakeMemory,
}
#: Those that tell their own tensors from others.
OWNERS = [name for name in MEMORIES if name not in ("of tests", "fake")]


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> Any:
    return MEMORIES[request.param]()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("numel", [0, 1, 4096, 5000])
def test_a_tensor_is_flat_and_has_what_was_asked_for(
    memory: Any, numel: int, dtype: torch.dtype
) -> None:
    tensor = memory.tensor(numel, dtype, component="test", zero=True)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((numel,), dtype, "cpu")
    assert tensor.is_contiguous()
    assert tensor.count_nonzero() == 0
    tensor.fill_(1)
    assert tensor.sum() == numel


def test_tensors_do_not_overlap(memory: Any) -> None:
    one, other = (memory.tensor(5000, torch.uint8, component="test") for _ in range(2))
    one.fill_(1)
    other.fill_(2)
    assert one.unique().tolist() == [1]


@pytest.mark.parametrize("memory", OWNERS, indirect=True)
def test_memory_and_its_views_are_told_from_that_of_others(memory: Any) -> None:
    tensor = memory.tensor(5000, torch.float32, component="test")
    assert memory.contains(tensor)
    assert memory.contains(tensor[4000:])
    assert not memory.contains(torch.empty(10))


def test_a_view_keeps_its_memory(memory: Any) -> None:
    view = memory.tensor(5000, torch.uint8, component="test", zero=True)[100:200].fill_(7)
    gc.collect()
    others = [memory.tensor(5000, torch.uint8, component="test").fill_(1) for _ in range(3)]
    assert view.unique().tolist() == [7]
    del others
