"""Stock DeepSpeed's memory and files behind our interfaces, for ablations."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from memascend.base.units import PAGE_BYTES
from memascend.deepspeed.stock.memory import (
    AioFileStore,
    LockedMemory,
    PinnedMemory,
)
from memascend.memory.pool import Lease, Pool

# -- pinned memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(("numel", "dtype"), [(1, torch.uint8), (5000, torch.bfloat16)])
def test_pinned_tensors_are_exact_and_start_at_a_page(numel: int, dtype: torch.dtype) -> None:
    memory = PinnedMemory()
    tensor = memory.tensor(numel, dtype, component="x", zero=True)
    assert (tensor.shape, tensor.dtype) == ((numel,), dtype)
    assert tensor.data_ptr() % PAGE_BYTES == 0
    assert tensor.count_nonzero() == 0
    assert memory.contains(tensor)
    assert memory.contains(tensor[-1:])
    assert not memory.contains(torch.empty(10))


def test_pinned_memory_is_forgotten_with_its_last_view() -> None:
    memory = PinnedMemory()
    tensor = memory.tensor(5000, torch.uint8, component="x")
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert memory.contains(view)
    del view
    gc.collect()
    assert memory._ranges == {}


# -- files ---------------------------------------------------------------------------------------


def aio_refusal() -> str:
    """Why DeepSpeed's libaio engine cannot run here, empty when it can."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if shutil.which("ninja") is None:
        return "DeepSpeed's async_io op needs ninja on the PATH"
    if not AsyncIOBuilder().is_compatible(verbose=False):
        return "DeepSpeed's async_io op needs libaio"
    return ""


@pytest.fixture(scope="module")
def handle() -> Any:
    if refusal := aio_refusal():
        pytest.skip(refusal)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False).aio_handle(block_size=1 << 20, queue_depth=8)


@pytest.fixture
def files(handle: Any, tmp_path: Path) -> Iterator[AioFileStore]:
    store = AioFileStore(handle, str(tmp_path / "run"))
    yield store
    store.wait_all()


@pytest.fixture
def locked_pool(handle: Any) -> Pool:
    return Pool(memory=LockedMemory(handle), component="slots")


def slot(pool: Pool, numel: int, fill: float) -> tuple[Lease, torch.Tensor]:
    pool.grow(numel * 2)
    lease = pool.acquire(numel * 2)
    assert lease is not None
    return lease, lease.view(numel, torch.bfloat16).fill_(fill)


@pytest.mark.deepspeed
@pytest.mark.parametrize("numel", [1, 5000, 600_001])
def test_a_slot_comes_back_from_its_file(
    files: AioFileStore, locked_pool: Pool, numel: int
) -> None:
    lease, source = slot(locked_pool, numel, 3)
    files.write(key="a", source=source, hold=lease.hold()).wait()
    other, target = slot(locked_pool, numel, 0)
    files.read(key="a", target=target, hold=other.hold()).wait()
    assert target.unique().tolist() == [3.0]


@pytest.mark.deepspeed
def test_memory_the_engine_does_not_know_is_filled_on_return(
    files: AioFileStore, locked_pool: Pool
) -> None:
    lease, source = slot(locked_pool, 5000, 3)
    files.write(key="a", source=source, hold=lease.hold()).wait()
    target = torch.zeros(5001, dtype=torch.bfloat16)
    ticket = files.read(key="a", target=target[1:])
    assert ticket.done()
    assert target[1:].unique().tolist() == [3.0]
    assert target[0] == 0


@pytest.mark.deepspeed
def test_a_slot_in_flight_is_held(files: AioFileStore, locked_pool: Pool) -> None:
    lease, source = slot(locked_pool, 5000, 1)
    ticket = files.write(key="a", source=source, hold=lease.hold())
    lease.release()
    assert locked_pool.acquire(10_000) is None
    ticket.wait()
    assert ticket.done()
    del ticket
    gc.collect()
    assert locked_pool.acquire(10_000) is not None


@pytest.mark.deepspeed
def test_a_file_is_there_until_its_key_is_discarded(files: AioFileStore, locked_pool: Pool) -> None:
    lease, source = slot(locked_pool, 5000, 1)
    files.reserve(key="a", nbytes=source.nbytes)
    files.write(key="a", source=source, hold=lease.hold())
    assert files.discard(key="a")
    assert not files.discard(key="a")


@pytest.mark.deepspeed
def test_the_folder_goes_with_the_store(handle: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store = AioFileStore(handle, str(folder))
    assert folder.is_dir()
    del store
    gc.collect()
    assert not os.path.exists(folder)


def test_a_forked_child_that_ends_leaves_the_files_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store = AioFileStore(RecordingHandle(), str(folder))
    child = os.fork()
    if child == 0:
        del store
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert folder.is_dir()


class RecordingHandle:
    """Stands for DeepSpeed's engine, which aborts the process when a file is too short to read."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._count = 0

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def async_pread(self, tensor: torch.Tensor, path: str, offset: int) -> None:
        self._started("read")

    def async_pwrite(self, tensor: torch.Tensor, path: str, offset: int) -> None:
        self._started("write")

    def wait(self) -> int:
        self.calls.append("wait")
        count, self._count = self._count, 0
        return count

    def _started(self, what: str) -> None:
        self.calls.append(what)
        self._count += 1


def test_a_read_waits_for_the_write_of_its_file(tmp_path: Path) -> None:
    """The engine runs transfers in any order, and one may be all there is of a file."""
    handle = RecordingHandle()
    store = AioFileStore(handle, str(tmp_path / "run"))
    tensor = torch.empty(PAGE_BYTES, dtype=torch.uint8)
    store.write(key="a", source=tensor)
    store.read(key="a", target=tensor)
    assert handle.calls == ["write", "wait", "read"]


def test_a_write_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    handle = RecordingHandle()
    store = AioFileStore(handle, str(tmp_path / "run"))
    tensor = torch.empty(PAGE_BYTES, dtype=torch.uint8)
    store.read(key="a", target=tensor)
    store.write(key="a", source=tensor)
    assert handle.calls == ["read", "wait", "write"]


def test_a_transfer_the_engine_did_not_complete_is_an_error(tmp_path: Path) -> None:
    handle = RecordingHandle()
    store = AioFileStore(handle, str(tmp_path / "run"))
    ticket = store.read(key="a", target=torch.empty(PAGE_BYTES, dtype=torch.uint8))
    handle._count = 0
    with pytest.raises(OSError, match="0 of 1 transfers"):
        ticket.wait()


def test_a_part_of_a_key_is_refused(tmp_path: Path) -> None:
    store = AioFileStore(RecordingHandle(), str(tmp_path / "run"))
    tensor = torch.empty(PAGE_BYTES, dtype=torch.uint8)
    for transfer in (
        lambda: store.read(key="a", target=tensor, offset_bytes=PAGE_BYTES),
        lambda: store.write(key="a", source=tensor, offset_bytes=PAGE_BYTES),
    ):
        with pytest.raises(ValueError, match=r"a: .*4096.*direct_nvme"):
            transfer()
