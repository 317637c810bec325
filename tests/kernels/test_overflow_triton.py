"""The device kernel: on a GPU where there is one, else in Triton's interpreter on host tensors."""

from __future__ import annotations

import importlib.util
import math
import os
import sys

import pytest
import torch

_HAS_GPU = torch.cuda.is_available()
if not _HAS_GPU and "triton" not in sys.modules:
    # Read when triton is imported and when a kernel is defined, so before either.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install triton)", allow_module_level=True)
if not _HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True
    )

from memascend._core import ScanResult  # noqa: E402
from memascend.kernels import overflow_triton  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = overflow_triton.BLOCK_NUMEL
DEVICE = "cuda" if _HAS_GPU else "cpu"


def random_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator).to(device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_the_sum_of_squares_is_that_of_double_arithmetic(numel: int, dtype: torch.dtype) -> None:
    tensor = random_tensor(numel, dtype)
    result = overflow_triton.scan(tensor, sum_squares=True)
    assert not result.non_finite
    assert result.sum_squares == pytest.approx(float((tensor.double() ** 2).sum()), rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("index", [0, BLOCK, 2 * BLOCK + 4])
def test_one_non_finite_element_is_found_anywhere(
    index: int, value: float, dtype: torch.dtype
) -> None:
    tensor = random_tensor(2 * BLOCK + 5, dtype)
    tensor[index] = value
    assert overflow_triton.scan(tensor).non_finite
    summed = overflow_triton.scan(tensor, sum_squares=True)
    assert summed.non_finite
    assert math.isnan(summed.sum_squares)


def test_elements_behind_the_end_are_not_read() -> None:
    whole = random_tensor(BLOCK, torch.float32)
    whole[100:] = math.nan
    assert not overflow_triton.scan(whole[:100]).non_finite


def test_finite_squares_beyond_fp32_are_summed() -> None:
    result = overflow_triton.scan(torch.full((7,), 1e30, device=DEVICE), sum_squares=True)
    assert not result.non_finite
    assert result.sum_squares == pytest.approx(7e60, rel=1e-6)


def test_programs_share_more_blocks_than_there_are_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overflow_triton, "PROGRAMS_MAX", 4)
    tensor = random_tensor(11 * BLOCK + 3, torch.float32)
    result = overflow_triton.scan(tensor, sum_squares=True)
    assert result.sum_squares == pytest.approx(float((tensor.double() ** 2).sum()), rel=1e-12)
    tensor[-1] = math.inf
    assert overflow_triton.scan(tensor).non_finite


def test_the_sum_is_nan_unless_asked_for() -> None:
    assert math.isnan(overflow_triton.scan(random_tensor(10, torch.float32)).sum_squares)


@pytest.mark.skipif(_HAS_GPU, reason="kernels are compiled here")
def test_interpreted_kernels_are_not_for_training() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        overflow_triton.try_on(DEVICE)


def test_a_kernel_that_gives_other_sums_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow_triton.triton, "JITFunction", object)
    overflow_triton.try_on(DEVICE)
    scan = overflow_triton.scan

    def inexact(tensor: torch.Tensor, *, sum_squares: bool = False) -> ScanResult:
        found = scan(tensor, sum_squares=sum_squares)
        return ScanResult(non_finite=found.non_finite, sum_squares=found.sum_squares * 1.0001)

    monkeypatch.setattr(overflow_triton, "scan", inexact)
    with pytest.raises(RuntimeError, match="sum"):
        overflow_triton.try_on(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_in_fp32_have_the_bits_of_stock(dtype: torch.dtype) -> None:
    for numel in (1, 1000, BLOCK + 1, 3 * BLOCK + 17):
        tensor = random_tensor(numel, dtype)
        norm = overflow_triton.launch(tensor, sum_squares=True)[1] ** 0.5
        stock = (tensor.double().norm(2) ** 2.0) ** 0.5
        expected = torch.tensor(float(stock**2), dtype=torch.float32)
        assert torch.tensor(float(norm**2), dtype=torch.float32) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not _HAS_GPU, reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_device_tensor_gives_the_same_bits_twice_and_agrees_with_the_host(
    dtype: torch.dtype,
) -> None:
    from memascend.kernels import overflow

    tensor = torch.randn(50_000_001, device="cuda").to(dtype)
    first = overflow.scan(tensor, sum_squares=True)
    assert first.sum_squares == overflow.scan(tensor, sum_squares=True).sum_squares
    assert first.sum_squares == pytest.approx(
        overflow.scan(tensor.cpu(), sum_squares=True).sum_squares, rel=1e-12
    )
    tensor[-1] = math.nan
    assert overflow.scan(tensor).non_finite
