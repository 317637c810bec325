"""A rank's tensors as files: every byte, few slots, and a line of the manifest for each file."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import torch

from memascend.checkpoint.files import FileReader, TensorReader
from memascend.checkpoint.manifest import FileEntry
from memascend.deepspeed.checkpoint.writer import _Writer
from memascend.deepspeed.optimizer.restore import StoredTensor
from memascend.nvme.store import TensorStore
from memascend.transfer.staging import StagingSlots
from tests.support.streaming_hosts import memory_store, staging_slots


@pytest.fixture
def store() -> TensorStore:
    return memory_store()


@pytest.fixture
def slots(store: TensorStore) -> StagingSlots:
    return staging_slots(store)


def stored(
    store: TensorStore, slots: StagingSlots, numel: int, state: str | None = None
) -> tuple[StoredTensor, torch.Tensor]:
    """A tensor in the store, whose file is 13 bytes longer, and its values."""
    data = torch.randn(numel)
    key, nbytes = f"key {state}", data.nbytes
    store.reserve(key=key, nbytes=max(nbytes, 1))
    slots.fill(key=key, nbytes=nbytes, source=TensorReader(lambda: data).fill)
    read = partial(slots.stream, key=key, nbytes=nbytes)
    tensor = StoredTensor(0, state, data.dtype, numel, read, f"{state}.tensor.swp", nbytes + 13)
    return tensor, data


@pytest.mark.parametrize("numel", [0, 1, 1024, 25_001])
def test_a_key_becomes_a_file_and_a_key_again(
    store: TensorStore, slots: StagingSlots, tmp_path: Path, numel: int
) -> None:
    tensor, data = stored(store, slots, numel)
    moved: list[int] = []
    passed: list[bytes] = []
    (tmp_path / "rank00").mkdir()
    writer = _Writer(tmp_path, tmp_path / "rank00", moved.append)
    writer.add(tensor, also=lambda piece: passed.append(bytes(piece)))
    content = (tmp_path / "rank00" / tensor.file_name).read_bytes()
    assert content == bytes(data.numpy()) + bytes(13)
    assert b"".join(passed) == bytes(data.numpy())
    assert sum(moved) == len(content)
    crc32 = f"{zlib.crc32(content):08x}"
    name = f"rank00/{tensor.file_name}"
    assert writer.files == [FileEntry(name=name, nbytes=len(content), crc32=crc32)]
    reader = FileReader(tmp_path / name)
    store.reserve(key="b", nbytes=data.nbytes + 20)
    slots.fill(key="b", nbytes=data.nbytes + 20, source=reader.fill)
    reader.close()
    target = torch.full((data.nbytes + 20,), 7, dtype=torch.uint8)
    slots.read(key="b", target=target)
    assert bytes(target.numpy()) == bytes(data.numpy()) + bytes(20)


def test_tensors_are_put_into_deepspeeds_file_too_and_all_bytes_are_counted(
    store: TensorStore, slots: StagingSlots, tmp_path: Path
) -> None:
    master, weights = stored(store, slots, 3000)
    moment, averages = stored(store, slots, 3000, "exp_avg")
    path = tmp_path / "optim_states.pt"
    base = {"state": {0: {"step": 3}}, "param_groups": []}
    zero = {"fp32_flat_groups": (torch.empty(0),), "optimizer_state_dict": base}
    torch.save({"optimizer_state_dict": zero, "kept": 1}, path)
    moved: list[int] = []
    writer = _Writer(tmp_path, tmp_path, moved.append)
    writer.add_also_to(path, [master, moment])
    content = torch.load(path, weights_only=False)
    found = content["optimizer_state_dict"]
    assert content["kept"] == 1
    assert torch.equal(found["fp32_flat_groups"][0], weights)
    assert torch.equal(found["optimizer_state_dict"]["state"][0]["exp_avg"], averages)
    assert found["optimizer_state_dict"]["state"][0]["step"] == 3
    assert sum(moved) == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert {entry.name for entry in writer.files} == {one.name for one in tmp_path.iterdir()}


def test_whoever_stops_listening_gives_every_slot_back(
    store: TensorStore, slots: StagingSlots
) -> None:
    tensor, _ = stored(store, slots, 25_001)
    for _ in range(3):
        for _staged in tensor.read():
            break
    unfinished = tensor.read()
    next(unfinished)
    with pytest.raises(KeyError):
        unfinished.throw(KeyError())  # type: ignore[attr-defined]
    slots.resize(slot_bytes=slots.slot_bytes, slot_count=2)  # refuses while one is taken
