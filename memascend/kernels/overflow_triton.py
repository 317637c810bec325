"""The fused overflow check for device tensors: two Triton kernels and a scratch of a few KiB.

The first kernel gives each program a run of blocks and leaves one flag and one partial sum per
program; the second adds those up in a single program. No atomics, so a sum has the same bits from
run to run. Imports torch and triton: only `memascend.kernels.overflow` imports this module, and
only when it is given a device tensor.

Squares are formed and added in double, as on the host: a gradient under loss scaling may be finite
and its square beyond fp32. A sum is slower on devices with few fp64 units.
"""

# Triton's decorator and the kernels it compiles carry no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from memascend._core import ScanResult

BLOCK_NUMEL = 2048
PROGRAMS_MAX = 1024


def scan(tensor: torch.Tensor, *, sum_squares: bool = False) -> ScanResult:
    """Scan a contiguous device tensor and wait for the result; see `overflow.scan`."""
    found, total = launch(tensor, sum_squares=sum_squares).tolist()
    return ScanResult(non_finite=found != 0.0, sum_squares=total)


def launch(tensor: torch.Tensor, *, sum_squares: bool = False) -> torch.Tensor:
    """Queue a scan on the current stream, and return without waiting for it.

    Returns:
        Two doubles on the tensor's device: 1 if any element is inf or nan, else 0; and the sum of
        squares, NaN unless it was asked for and every element is finite.
    """
    block_count = triton.cdiv(tensor.numel(), BLOCK_NUMEL)
    blocks_each = triton.cdiv(block_count, PROGRAMS_MAX)
    program_count = max(1, triton.cdiv(block_count, max(1, blocks_each)))
    found = torch.empty(program_count, dtype=torch.int32, device=tensor.device)
    partial = torch.empty(program_count, dtype=torch.float64, device=tensor.device)
    result = torch.empty(2, dtype=torch.float64, device=tensor.device)
    # Triton launches on the current device, which need not be the tensor's.
    with _current(tensor.device):
        _scan_kernel[(program_count,)](
            tensor, tensor.numel(), blocks_each, found, partial, sum_squares, BLOCK_NUMEL
        )
        _finish_kernel[(1,)](found, partial, program_count, result, sum_squares, PROGRAMS_MAX)
    return result


def try_on(device_type: str) -> None:
    """Scan a small tensor, and compare the result.

    Raises:
        RuntimeError: The result is wrong, or Triton interprets the kernels, which takes hours.
        Exception: Any error of Triton on a device that it does not support.
    """
    if not isinstance(_scan_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set")
    values = torch.arange(BLOCK_NUMEL + 9, dtype=torch.float32, device=device_type)
    expected = sum(number * number for number in range(values.numel()))
    found = scan(values, sum_squares=True)
    values[-1] = float("inf")
    if found.non_finite or found.sum_squares != expected or not scan(values).non_finite:
        raise RuntimeError(f"the kernel's sum is {found.sum_squares}, not {expected}")


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with the device as the current one, if its type has several."""
    choose = getattr(getattr(torch, device.type), "device", None)
    if choose is None or device.index is None:
        return nullcontext()
    current: AbstractContextManager[object] = choose(device)
    return current


# Without do_not_specialize, Triton would compile again for a count of 1, a multiple of 16, or any
# other: in the first backward, while other ranks wait in a collective.
@triton.jit(do_not_specialize=["numel", "blocks_each"])
def _scan_kernel(
    source, numel, blocks_each, found, partial, SUM_SQUARES: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    first = program.to(tl.int64) * blocks_each * BLOCK
    end = tl.minimum(first + blocks_each.to(tl.int64) * BLOCK, numel)
    lane = tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], dtype=tl.int32)
    sums = tl.zeros([BLOCK], dtype=tl.float64)
    # A mask narrows the loads, since the count's divisors are unknown: whole blocks have none.
    whole_count = tl.maximum(end - first, 0) // BLOCK
    for block in range(whole_count):
        values = tl.load(source + first + block * BLOCK + lane)
        seen, sums = _add(values, seen, sums, SUM_SQUARES)
    index = first + whole_count * BLOCK + lane
    values = tl.load(source + index, mask=index < end, other=0.0)
    seen, sums = _add(values, seen, sums, SUM_SQUARES)
    tl.store(found + program, tl.max(seen, axis=0))
    if SUM_SQUARES:
        tl.store(partial + program, tl.sum(sums, axis=0))


@triton.jit
def _add(values, seen, sums, SUM_SQUARES: tl.constexpr):
    values = values.to(tl.float32)
    # False for nan as well: no comparison with nan holds.
    finite = tl.abs(values) < float("inf")
    seen = tl.where(finite, seen, 1)
    if SUM_SQUARES:
        wide = values.to(tl.float64)
        sums += wide * wide
    return seen, sums


@triton.jit(do_not_specialize=["program_count"])
def _finish_kernel(
    found, partial, program_count, result, SUM_SQUARES: tl.constexpr, PROGRAMS: tl.constexpr
):
    program = tl.arange(0, PROGRAMS)
    mask = program < program_count
    seen = tl.max(tl.load(found + program, mask=mask, other=0), axis=0)
    total = float("nan")
    if SUM_SQUARES:
        added = tl.sum(tl.load(partial + program, mask=mask, other=0.0), axis=0)
        total = tl.where(seen != 0, float("nan"), added)
    tl.store(result, seen.to(tl.float64))
    tl.store(result + 1, total)
