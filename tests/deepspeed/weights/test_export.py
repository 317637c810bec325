"""The consolidated weights as a file: exact, small in memory, and clear when the drive is full."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.streaming_fakes import FakeMemory, FakeStore

pytest.importorskip("deepspeed")

from memascend.checkpoint import files
from memascend.deepspeed.weights import export
from memascend.deepspeed.weights.export import WeightFile
from memascend.errors import StoreError, StoreFullError, TornStepError
from memascend.streaming.optimizer.step import Step
from memascend.transfer.staging import StagingSlots

SLOT_BYTES = 4096


@pytest.fixture
def staging() -> StagingSlots:
    return StagingSlots(store=FakeStore(), memory=FakeMemory(), slot_bytes=SLOT_BYTES, slot_count=3)


def shapes_of(tensors: dict[int, torch.Tensor]) -> dict[int, tuple[torch.Size, torch.dtype]]:
    return {number: (one.shape, one.dtype) for number, one in tensors.items()}


def test_what_is_mapped_is_what_was_written(
    tmp_path: Path, staging: StagingSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FLUSH_BYTES", 1 << 14)
    tensors = {
        1: torch.randn(3, 5).bfloat16(),
        2: torch.randn(70, 200),
        3: torch.empty(0, 4),
        4: torch.tensor(7.0, dtype=torch.float16),
        5: torch.randn(64, 65).t(),  # not contiguous
    }
    file = WeightFile(str(tmp_path), shapes_of(tensors))
    assert list(tmp_path.iterdir()) == []  # no name: nothing is left behind, whatever happens
    for number, tensor in tensors.items():
        file.write_tensor(number, tensor, staging)
    found = file.map()
    file.close()
    for number, tensor in tensors.items():
        assert torch.equal(found[number], tensor)
        assert found[number].dtype == tensor.dtype
        assert found[number].shape == tensor.shape
    assert len({one.untyped_storage().data_ptr() for n, one in found.items() if n != 3}) == 4
    found[2].zero_()  # it is the caller's
    assert torch.equal(found[1], tensors[1])


def test_nothing_at_all_can_be_saved(tmp_path: Path) -> None:
    file = WeightFile(str(tmp_path), {})
    assert file.map() == {}
    file.close()


def failing(number: int) -> Callable[..., int]:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_drive_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(StoreFullError, match=r"needs 8\.00 KiB.*(.|\n)*fix: free space"):
        WeightFile(str(tmp_path), {1: (torch.Size([4096]), torch.bfloat16)})


def named(tensor: torch.Tensor) -> export._NamedTensor:
    return export._NamedTensor("weight", tensor, is_parameter=True)


@pytest.mark.parametrize("place", ["posix_fallocate", "write", "fsync"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_raises_when_the_first_one_fails(
    rank: int,
    place: str,
    tmp_path: Path,
    staging: StagingSlots,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that went on alone would wait for the others in the next collective."""
    gathered: list[Any] = []

    class Gathered:
        def __init__(self, params: list[Any]) -> None:
            gathered.extend(params)

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def broadcast(flag: torch.Tensor, src: int) -> None:
        if rank != src:
            flag.fill_(place == "posix_fallocate" or len(gathered) == 2)

    monkeypatch.setattr(export.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(export.dist, "broadcast", broadcast)
    monkeypatch.setattr(export.deepspeed.zero, "GatheredParameters", Gathered)
    owner = files.FlushedFile if place == "write" else os
    monkeypatch.setattr(owner, place, failing(errno.EIO))
    runtime = SimpleNamespace(directory=str(tmp_path), staging=staging, lock=threading.RLock())
    tensors = [named(torch.ones(3)), named(torch.ones(5))]
    with pytest.raises(StoreError if rank or place == "posix_fallocate" else OSError):
        export._consolidate(tensors, SimpleNamespace(runtime=runtime))  # type: ignore[arg-type]
    assert len(gathered) == (0 if place == "posix_fallocate" else 2)


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_model_with_values_of_two_steps_is_not_saved(is_torn: bool) -> None:
    steps = SimpleNamespace(current=Step(), finish=lambda: None)
    if is_torn:
        steps.current.note_load()
        with pytest.raises(TornStepError, match="load a checkpoint"):
            export._check_values(SimpleNamespace(steps=steps))
    else:
        export._check_values(SimpleNamespace(steps=steps))
    export._check_values(SimpleNamespace())  # of inference
