"""A tensor that is read in another dtype: any piece of it, rounded or widened as torch does."""

from __future__ import annotations

import pytest
import torch

from memascend.checkpoint import converted as module
from memascend.checkpoint.converted import ConvertedReader, converted
from memascend.checkpoint.files import TensorReader
from memascend.checkpoint.source import LoadedTensor

FP32, BF16 = torch.float32, torch.bfloat16
NUMEL = 1000


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_NUMEL", 96)


def values(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(dtype)


def loaded(value: torch.Tensor) -> LoadedTensor:
    return LoadedTensor(0, "exp_avg", value.dtype, TensorReader(lambda: value))


@pytest.mark.parametrize(("saved", "wanted"), [(FP32, BF16), (BF16, FP32)])
def test_pieces_are_those_of_the_whole_tensor_converted(
    saved: torch.dtype, wanted: torch.dtype
) -> None:
    value = values(saved)
    tensor = converted(loaded(value), wanted)
    assert tensor.dtype == wanted
    found = torch.empty(NUMEL, dtype=wanted)
    for begin, end in ((0, 7), (7, 500), (500, NUMEL)):
        piece = found[begin:end].view(torch.uint8)
        tensor.reader.fill(begin * wanted.itemsize, piece)
    assert torch.equal(found, value.to(wanted))


def test_behind_the_end_there_are_zeros() -> None:
    reader = ConvertedReader(TensorReader(lambda: values(BF16)), saved=BF16, wanted=FP32)
    found = torch.ones(NUMEL + 200)
    reader.fill(0, found.view(torch.uint8))
    assert torch.equal(found[:NUMEL], values(BF16).float())
    assert not found[NUMEL:].any()


def test_closing_lets_go_of_memory_and_reading_goes_on() -> None:
    reader = ConvertedReader(TensorReader(lambda: values(FP32)), saved=FP32, wanted=BF16)
    found = torch.empty(NUMEL, dtype=BF16)
    reader.fill(0, found.view(torch.uint8))
    reader.close()
    assert reader._piece is None
    again = torch.empty(NUMEL, dtype=BF16)
    reader.fill(0, again.view(torch.uint8))
    assert torch.equal(found, again)


def test_a_tensor_in_the_dtype_that_is_wanted_is_left_alone() -> None:
    tensor = loaded(values(FP32))
    assert converted(tensor, FP32) is tensor
