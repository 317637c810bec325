"""Tensors of the store as files, and back: every byte, few slots, errors that say what to do."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from memascend.checkpoint import files
from memascend.checkpoint.files import FileReader, SummedFile, TensorReader, sum_file, write_file
from memascend.errors import CheckpointError
from memascend.nvme.store import TensorStore
from memascend.streaming.staging import StagingSlots
from tests.support.streaming_hosts import memory_store, staging_slots

SIZES = (0, 1, 4096, 100_003)


@pytest.fixture
def store() -> TensorStore:
    return memory_store()


@pytest.fixture
def slots(store: TensorStore) -> StagingSlots:
    return staging_slots(store)


def stored(store: TensorStore, slots: StagingSlots, nbytes: int) -> torch.Tensor:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    store.reserve(key="a", nbytes=max(nbytes, 1))
    slots.fill(key="a", nbytes=nbytes, source=TensorReader(data).fill)
    return data


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_key_becomes_a_file_and_a_key_again(
    store: TensorStore, slots: StagingSlots, tmp_path: Path, nbytes: int
) -> None:
    data = stored(store, slots, nbytes)
    moved, passed = [], []
    with SummedFile.create(tmp_path / "a") as file:
        write_file(
            slots,
            key="a",
            nbytes=nbytes,
            padded_bytes=nbytes + 13,
            file=file,
            advance=moved.append,
            also=lambda piece: passed.append(bytes(piece)),
        )
    content = (tmp_path / "a").read_bytes()
    assert content == bytes(data.numpy()) + bytes(13)
    assert b"".join(passed) == bytes(data.numpy())
    assert sum(moved) == nbytes
    assert (file.nbytes, file.crc32) == (len(content), zlib.crc32(content))
    assert sum_file(tmp_path / "a", slots, lambda _: None) == file.sum()
    reader = FileReader(tmp_path / "a")
    store.reserve(key="b", nbytes=nbytes + 20)
    slots.fill(key="b", nbytes=nbytes + 20, source=reader.fill)
    reader.close()
    target = torch.full((nbytes + 20,), 7, dtype=torch.uint8)
    slots.read(key="b", target=target)
    assert bytes(target.numpy()) == bytes(data.numpy()) + bytes(20)


def test_whoever_stops_listening_gives_every_slot_back(
    store: TensorStore, slots: StagingSlots
) -> None:
    data = stored(store, slots, 100_003)
    for _ in range(3):
        for _staged in slots.stream(key="a", nbytes=data.numel()):
            break
    unfinished = slots.stream(key="a", nbytes=data.numel())
    next(unfinished)
    with pytest.raises(KeyError):
        unfinished.throw(KeyError())  # type: ignore[attr-defined]
    slots.resize(slot_bytes=slots.slot_bytes, slot_count=2)  # refuses while one is taken


def test_files_are_made_durable_as_they_grow(
    store: TensorStore, slots: StagingSlots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = []
    real = os.fsync
    monkeypatch.setattr(files, "FLUSH_BYTES", 10_000)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (syncs.append(1), real(descriptor)))
    with SummedFile.create(tmp_path / "a") as file:
        for _ in range(35):
            file.write(bytes(1000))
    assert len(syncs) == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(CheckpointError, match=f"cannot write .*{os.strerror(code)}"),
        SummedFile.create(tmp_path / "a") as file,
    ):
        file.write(b"x")


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(CheckpointError, match="File exists"), SummedFile.create(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_text() == "old"


def test_a_tensor_in_memory_reads_as_its_bytes_and_zeros() -> None:
    value: Any = torch.arange(6, dtype=torch.float32).view(2, 3).t()
    target = torch.full((28,), 9, dtype=torch.uint8)
    TensorReader(value).fill(4, target)
    expected = bytes(value.contiguous().numpy())[4:] + bytes(8)
    assert bytes(target.numpy()) == expected
