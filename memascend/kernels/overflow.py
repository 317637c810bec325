"""The fused overflow check on tensors: inf or nan anywhere, and the sum of squares, in one pass.

Host tensors go to the native core by address, device tensors to the Triton kernel, or where that
does not run, to torch's own reductions. Knows nothing of gradients, ranks or loss scales. Callable
from any thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, cast

from memascend._core import KernelHelpers, ScanResult, overflow_scan

if TYPE_CHECKING:
    import torch

__all__ = ["KernelHelpers", "ScanResult", "scan", "sum_of_squares"]

log = logging.getLogger(__name__)

#: Elements per call of torch's own reductions, which make copies in fp64.
PIECE_NUMEL = 1 << 21

_DTYPES = ("float32", "float16", "bfloat16")


def scan(
    tensor: torch.Tensor,
    *,
    sum_squares: bool = False,
    threads: int = 0,
    helpers: KernelHelpers | None = None,
) -> ScanResult:
    """Read a contiguous fp32, fp16 or bf16 tensor once, without temporaries of its size.

    The result's `sum_squares` is NaN unless it was requested and every element is finite. On the
    host its bits depend only on the values and their number, not on threads or instruction set.

    Args:
        tensor: On the host or on any device. Another thread must not write to it meanwhile.
        sum_squares: Also add up the squares, in double. Costs no second pass.
        threads: Host only. 0 uses the CPUs this thread may run on, fewer for small tensors.
        helpers: Host only. Threads kept between calls; None: threads are started for this call.

    Raises:
        ValueError: The tensor is not contiguous, or its dtype, layout or device is not supported.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"cannot scan a tensor of dtype {dtype}; known: {', '.join(_DTYPES)}")
    layout = str(tensor.layout).removeprefix("torch.")
    if layout != "strided":
        raise ValueError(f"cannot scan a tensor of layout {layout}; pass its values")
    if not tensor.is_contiguous():
        raise ValueError(
            f"cannot scan a non-contiguous tensor: shape {tuple(tensor.shape)}, "
            f"stride {tensor.stride()}; pass the contiguous buffer it is a view of"
        )
    if tensor.device.type == "meta":
        raise ValueError("cannot scan a tensor on device meta: it has no values")
    if tensor.device.type != "cpu":
        kernel = _device_kernel(tensor.device.type)
        if kernel is not None:
            return cast("ScanResult", kernel.scan(tensor, sum_squares=sum_squares))
        return _scan_in_pieces(tensor, sum_squares=sum_squares)
    return overflow_scan(
        address=tensor.data_ptr(),
        numel=tensor.numel(),
        dtype=dtype,
        sum_squares=sum_squares,
        threads=threads,
        helpers=helpers,
    )


def sum_of_squares(
    tensor: torch.Tensor,
    *,
    fused: bool = True,
    threads: int = 0,
    helpers: KernelHelpers | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the sum of squares, added up in fp64; not finite if and only if an element is not.

    The order of additions differs from stock DeepSpeed's, so the last bits of the double differ.
    Norms are computed from it in fp32, where they are the same.

    Args:
        tensor: 1-D.
        fused: Use `scan` on the host, and the Triton kernel on a device that can run it; else
            torch's own reductions, on a piece at a time.
        threads: As for `scan`.
        helpers: As for `scan`.
        dtype: Dtype of the sum, for a device that has no fp64.

    Returns:
        A 0-dim tensor on the tensor's device, fp64 or `dtype`; does not wait for the device.
    """
    import torch

    dtype = dtype or torch.float64
    if fused and tensor.device.type == "cpu":
        result = scan(tensor, sum_squares=True, threads=threads, helpers=helpers)
        return torch.tensor(result.sum_squares, dtype=torch.float64)
    kernel = _device_kernel(tensor.device.type) if fused and dtype == torch.float64 else None
    if kernel is not None and tensor.is_contiguous() and dtype_name(tensor.dtype) in _DTYPES:
        return cast("torch.Tensor", kernel.launch(tensor, sum_squares=True)[1])
    return _sum_in_pieces(tensor, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the core's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def _scan_in_pieces(tensor: torch.Tensor, *, sum_squares: bool) -> ScanResult:
    """Scan with torch's own reductions, with temporaries as large as a piece."""
    import torch

    finite = [torch.isfinite(piece).all() for piece in _pieces(tensor)]
    non_finite = not bool(torch.stack(finite).all())
    total = float("nan")
    if sum_squares and not non_finite:
        total = _sum_in_pieces(tensor, torch.float64).item()
    return ScanResult(non_finite=non_finite, sum_squares=total)


def _sum_in_pieces(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add up as stock DeepSpeed does, but in smaller pieces: its copies in fp64 take 2 GB."""
    norms: list[torch.Tensor] = [piece.to(dtype).norm(2) for piece in _pieces(tensor)]
    total = norms[0].square()
    for norm in norms[1:]:
        total = total + norm.square()
    return total


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's pieces in order; an empty one if the tensor is empty."""
    flat = tensor.reshape(-1)
    for begin in range(0, max(1, flat.numel()), PIECE_NUMEL):
        yield flat.narrow(0, begin, min(PIECE_NUMEL, flat.numel() - begin))


@functools.cache
def _device_kernel(device_type: str) -> ModuleType | None:
    """Return the Triton kernel if it runs on the device with correct results, else None.

    It has to be tried: Triton may be missing, not support the device, or find no compiler.
    """
    if device_type == "cpu":
        return None
    try:
        from memascend.kernels import overflow_triton

        overflow_triton.try_on(device_type)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        log.info(
            "memascend: gradients on %s are checked with torch's reductions, without Triton: %s",
            device_type,
            reason,
        )
        return None
    return overflow_triton
