"""The face that training sees: tensors by key."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from memascend.errors import StoreError
from memascend.nvme.store import MemoryFaults, TensorStore
from tests.support.nvme_memory import BOUNCE_BYTES, PageMemory


@pytest.fixture
def store(tmp_path):
    with TensorStore(volumes=[tmp_path], bounce=PageMemory(BOUNCE_BYTES).tensor) as opened:
        yield opened


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 1000, 300_007])
def test_a_tensor_comes_back_bit_by_bit(store, dtype, numel):
    source = torch.randint(0, 255, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    store.write(key="w", source=source).wait()
    target = torch.zeros(numel, dtype=dtype)
    store.read(key="w", target=target).wait()
    assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


def test_a_slice_of_a_key_is_written_and_read_at_its_offset(store):
    store.write(key="w", source=torch.zeros(1000)).wait()
    store.write(key="w", source=torch.ones(10), offset_bytes=400).wait()
    target = torch.empty(30)
    store.read(key="w", target=target, offset_bytes=360).wait()
    assert target.tolist() == [0.0] * 10 + [1.0] * 10 + [0.0] * 10


def test_with_room_behind_it_an_odd_tensor_needs_no_bounce_buffer(store):
    page = torch.arange(4096, dtype=torch.int32).view(torch.uint8)[:8192].clone()
    memory = torch.empty(8192 + 4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 4096
    for capacity_bytes, bounced_bytes in ((8192, 0), (0, 4096)):
        before = store.core.stats()["bytes_bounced"]
        odd = memory[start : start + 5001].copy_(page[:5001])
        store.write(key="odd", source=odd, capacity_bytes=capacity_bytes).wait()
        memory.zero_()
        store.read(key="odd", target=odd, capacity_bytes=capacity_bytes).wait()
        assert torch.equal(odd, page[:5001])
        assert store.core.stats()["bytes_bounced"] - before == 2 * bounced_bytes


def test_the_tensor_and_what_it_lies_in_are_kept_until_the_io_is_over():
    faults = MemoryFaults()
    store = TensorStore(
        volumes=["(memory)"], bounce=PageMemory(BOUNCE_BYTES).tensor, engine="memory", faults=faults
    )
    faults.paused = True
    tensor, lease = torch.ones(1000), PageMemory(1)
    alive = (weakref.ref(tensor), weakref.ref(lease))
    ticket = store.write(key="w", source=tensor, hold=lease)
    del tensor, lease
    gc.collect()
    assert all(reference() is not None for reference in alive)
    faults.paused = False
    ticket.wait()
    gc.collect()
    assert all(reference() is None for reference in alive)


def test_one_line_says_what_was_obtained(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "memascend.nvme.store"):
        TensorStore(
            volumes=[tmp_path], bounce=PageMemory(BOUNCE_BYTES).tensor, engine="threads"
        ).close()
    (line,) = caplog.messages
    assert line.startswith("nvme: engine threads (asked for; pread and pwrite by 8 threads")
    assert str(tmp_path) in line


def test_a_path_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot use the volume") as caught:
        TensorStore(volumes=[tmp_path / "file"], bounce=PageMemory(BOUNCE_BYTES).tensor)
    assert caught.value.volume == str(tmp_path / "file")
    assert "fix: name a directory" in str(caught.value)


def test_a_file_system_that_takes_no_files_is_a_clear_error():
    with pytest.raises(StoreError, match="cannot use the volume /proc"):
        TensorStore(volumes=["/proc"], bounce=PageMemory(BOUNCE_BYTES).tensor)


def test_bounce_memory_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match="bounce buffers need at least"):
        TensorStore(volumes=[tmp_path], bounce=PageMemory(100).tensor)


def test_a_store_that_nobody_holds_is_closed(tmp_path):
    store = TensorStore(volumes=[tmp_path], bounce=PageMemory(BOUNCE_BYTES).tensor)
    core = store.core
    del store
    gc.collect()
    with pytest.raises(ValueError, match="closed"):
        core.keys()
