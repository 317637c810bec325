"""The overflow check on devices: the kernel where it runs, else torch's own reductions.

The device here is the host under another name.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memascend.kernels
from memascend import _core
from memascend.kernels import overflow

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


class OnDevice(torch.Tensor):
    """A tensor that says it lies on a device which no kernel of ours knows."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xpu", 0)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Pieces of few elements, and no memory of what was tried on a device."""
    monkeypatch.setattr(overflow, "PIECE_NUMEL", 64)
    overflow._device_kernel.cache_clear()
    yield 64
    overflow._device_kernel.cache_clear()


def stock_verdict(tensor: torch.Tensor) -> bool:
    return bool(torch.isinf(tensor).any() or torch.isnan(tensor).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_without_a_kernel_gets_the_verdict_of_stock_at_every_place(
    small_pieces: int, dtype: torch.dtype
) -> None:
    for numel in (0, 1, small_pieces, small_pieces + 1, 3 * small_pieces):
        assert not overflow.scan(on_device(torch.ones(numel, dtype=dtype))).non_finite
        for index in {0, small_pieces - 1, small_pieces, numel - 1}:
            for value in (math.inf, -math.inf, math.nan) if 0 <= index < numel else ():
                tensor = torch.ones(numel, dtype=dtype)
                tensor[index] = value
                assert stock_verdict(tensor)
                result = overflow.scan(on_device(tensor), sum_squares=True)
                assert result.non_finite, (numel, index, value)
                assert math.isnan(result.sum_squares)
                assert not torch.isfinite(overflow.sum_of_squares(on_device(tensor)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_without_a_kernel_gets_the_sum_of_the_host(
    small_pieces: int, dtype: torch.dtype
) -> None:
    tensor = random_tensor(5 * small_pieces + 7, dtype)
    host = overflow.scan(tensor, sum_squares=True).sum_squares
    result = overflow.scan(on_device(tensor), sum_squares=True)
    assert result.sum_squares == pytest.approx(host, rel=1e-14)
    assert overflow.sum_of_squares(on_device(tensor)).item() == result.sum_squares


def test_within_a_piece_the_sum_has_the_bits_of_stock() -> None:
    tensor = on_device(random_tensor(100_003, torch.bfloat16))
    stock = tensor.to(torch.float64).norm(2) ** 2.0
    assert overflow.sum_of_squares(tensor).item() == stock.item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_in_fp32_have_the_bits_of_stock_whatever_the_order_of_additions(
    small_pieces: int, dtype: torch.dtype
) -> None:
    """What stock makes of its sums: complete_grad_norm_calculation_for_cpu_offload."""
    generator = torch.Generator().manual_seed(11)
    for numel in range(1, 3000, 7):
        tensor = (torch.randn(numel, generator=generator) * 10.0 ** (numel % 9 - 4)).to(dtype)
        stock = (tensor.double().norm(2) ** 2.0) ** 0.5
        expected = torch.tensor(float(stock**2), dtype=torch.float32)
        for one in (tensor, on_device(tensor)):
            norm = overflow.sum_of_squares(one) ** 0.5
            assert torch.tensor(float(norm**2), dtype=torch.float32) == expected, numel


def test_no_copy_of_all_elements_is_made_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Watched(OnDevice):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = super().__torch_function__(function, types, args, kwargs or {})
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                made.append(result.numel())
            return result

    monkeypatch.setattr(overflow, "PIECE_NUMEL", 1000)
    overflow.sum_of_squares(torch.ones(10_000).as_subclass(Watched))
    assert max(made) == 1000


def test_a_device_without_fp64_adds_up_in_what_it_has(small_pieces: int) -> None:
    tensor = on_device(random_tensor(3 * small_pieces, torch.float16))
    found = overflow.sum_of_squares(tensor, dtype=torch.float32)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(tensor.double().square().sum().item(), rel=1e-5)


def test_why_a_device_has_no_kernel_is_said_once(
    small_pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=overflow.__name__):
        for _ in range(2):
            overflow.scan(on_device(torch.ones(small_pieces)))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "xpu" in line
    assert "Triton" in line


def test_without_triton_torch_serves(
    small_pieces: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "memascend.kernels.overflow_triton", raising=False)
    monkeypatch.delattr(memascend.kernels, "overflow_triton", raising=False)
    with caplog.at_level(logging.INFO, logger=overflow.__name__):
        assert not overflow.scan(on_device(torch.ones(small_pieces))).non_finite
    assert "triton" in caplog.text


class Kernel:
    """Stands where the Triton kernel does, for a device that it runs on."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def scan(self, tensor: torch.Tensor, *, sum_squares: bool) -> _core.ScanResult:
        self.calls.append("scan")
        return _core.ScanResult(non_finite=False, sum_squares=4.0)

    def launch(self, tensor: torch.Tensor, *, sum_squares: bool) -> torch.Tensor:
        self.calls.append("launch")
        return torch.tensor([0.0, 4.0], dtype=torch.float64)


def test_the_kernel_serves_verdicts_and_norms_where_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(overflow, "_device_kernel", lambda device_type: kernel)
    tensor = on_device(torch.ones(4))
    assert not overflow.scan(tensor).non_finite
    assert overflow.sum_of_squares(tensor).item() == 4.0
    assert kernel.calls == ["scan", "launch"]


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (torch.ones(4), {"fused": False}),
        (torch.ones(4), {"dtype": torch.float32}),
        (torch.ones(8)[::2], {}),
        (torch.ones(4, dtype=torch.float64), {}),
    ],
    ids=["not asked for", "no fp64", "not contiguous", "an unknown dtype"],
)
def test_the_kernel_is_left_alone_where_it_cannot_serve(
    monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, options: dict[str, Any]
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(overflow, "_device_kernel", lambda device_type: kernel)
    assert overflow.sum_of_squares(on_device(tensor), **options).item() == pytest.approx(4.0)
    assert kernel.calls == []
