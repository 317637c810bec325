"""Files of a checkpoint: every byte, summed up, durable, with errors that say what to do."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from memascend.checkpoint import files
from memascend.checkpoint.files import FileReader, SummedFile, TensorReader, sum_file
from memascend.errors import CheckpointError, StoreError


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_003])
def test_a_file_is_summed_up_while_it_is_written_and_read_again(
    tmp_path: Path, nbytes: int
) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    written: list[int] = []
    summed: list[int] = []
    with SummedFile.create(tmp_path / "a", written.append) as file:
        for begin in range(0, nbytes, 4096):
            file.write(data[begin : begin + 4096].numpy())
    content = bytes(data.numpy())
    assert (tmp_path / "a").read_bytes() == content
    assert (file.nbytes, file.crc32) == (nbytes, zlib.crc32(content))
    assert sum_file(tmp_path / "a", summed.append) == (file.nbytes, file.crc32)
    assert sum(written) == sum(summed) == nbytes
    reader = FileReader(tmp_path / "a")
    target = torch.full((nbytes + 20,), 7, dtype=torch.uint8)
    for begin in range(0, nbytes + 20, 999):
        reader.fill(begin, target[begin : begin + 999])
    reader.close()
    assert bytes(target.numpy()) == content + bytes(20)


def test_files_are_made_durable_as_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_tensor_that_cannot_be_read_is_no_fault_of_the_checkpoints_drive(tmp_path: Path) -> None:
    failed = StoreError(5, "cannot read exp_avg from /mnt/ssd")
    with pytest.raises(StoreError) as caught, SummedFile.create(tmp_path / "a"):
        raise failed
    assert caught.value is failed


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(CheckpointError, match="File exists"), SummedFile.create(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_checkpoints_file_has_the_mode_that_the_umask_gives(
    tmp_path: Path, mask: int, mode: int
) -> None:
    old = os.umask(mask)
    try:
        with SummedFile.create(tmp_path / "a"):
            pass
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == mode


def test_a_tensor_in_memory_reads_as_its_bytes_and_zeros() -> None:
    value: Any = torch.arange(6, dtype=torch.float32).view(2, 3).t()
    target = torch.full((28,), 9, dtype=torch.uint8)
    TensorReader(lambda: value).fill(4, target)
    expected = bytes(value.contiguous().numpy())[4:] + bytes(8)
    assert bytes(target.numpy()) == expected
