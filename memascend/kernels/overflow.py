"""The fused overflow check on tensors: inf or nan anywhere, and the sum of squares, in one pass.

Host tensors go to the native core by address, device tensors to the Triton kernel. Knows nothing of
gradients, ranks or loss scales. Callable from any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend._core import ScanResult, overflow_scan

if TYPE_CHECKING:
    import torch

__all__ = ["ScanResult", "scan", "sum_of_squares"]

_DTYPES = ("float32", "float16", "bfloat16")


def scan(tensor: torch.Tensor, *, sum_squares: bool = False, threads: int = 0) -> ScanResult:
    """Read a contiguous fp32, fp16 or bf16 tensor once; allocate nothing of its size.

    `sum_squares` of the result is NaN unless it was asked for and every element is finite. On the
    host its bits depend on the values and their number alone, not on threads or instruction set.

    Args:
        tensor: On the host or on a CUDA device. Another thread must not write to it meanwhile.
        sum_squares: Also add up the squares, in double. Costs no second pass.
        threads: Host only. 0 uses the CPUs this thread may run on, fewer for small tensors.

    Raises:
        ValueError: The tensor is not contiguous, or not of a dtype or device that can be scanned.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
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
    if tensor.device.type == "cuda":
        from memascend.kernels import overflow_triton

        return overflow_triton.scan(tensor, sum_squares=sum_squares)
    if tensor.device.type != "cpu":
        raise ValueError(f"cannot scan a tensor on device {tensor.device}; known: cpu, cuda")
    return overflow_scan(
        address=tensor.data_ptr(),
        numel=tensor.numel(),
        dtype=dtype,
        sum_squares=sum_squares,
        threads=threads,
    )


def sum_of_squares(tensor: torch.Tensor, *, fused: bool = True, threads: int = 0) -> torch.Tensor:
    """Return the sum of squares, added up in fp64; not finite exactly if an element is not.

    Args:
        tensor: 1-D.
        fused: Use `scan` on the host; a device, and a host without it, makes an fp64 copy.
        threads: As for `scan`.

    Returns:
        A 0-dim fp64 tensor on the tensor's device.
    """
    import torch

    if fused and tensor.device.type == "cpu":
        result = scan(tensor, sum_squares=True, threads=threads)
        return torch.tensor(result.sum_squares, dtype=torch.float64)
    norm: torch.Tensor = tensor.to(torch.float64).norm(2)
    return norm.square()
