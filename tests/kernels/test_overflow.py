"""The overflow check on host memory: every kernel of this CPU against exact arithmetic."""

from __future__ import annotations

import math
import os
import struct
import threading
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memascend import _core
from memascend.kernels import overflow
from tests.support.examples import examples

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = _core.kernel_isas()
BLOCK_BYTES = 64 * 1024

# Bits of: +inf, -inf, quiet and signalling nans of both signs, smallest and largest payloads.
NON_FINITE_BITS = {
    torch.float32: [
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000),
        *(0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF),
    ],
    torch.float16: [0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFC01, 0x7FFF, 0xFFFF],
    torch.bfloat16: [0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFF81, 0x7FFF, 0xFFFF],
}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def scan(tensor: torch.Tensor, **options: object) -> _core.ScanResult:
    return _core.overflow_scan(
        address=tensor.data_ptr(), numel=tensor.numel(), dtype=name(tensor.dtype), **options
    )


def random_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


def exact_sum_squares(tensor: torch.Tensor) -> Fraction:
    return sum((Fraction(value) ** 2 for value in tensor.double().tolist()), Fraction(0))


def set_bits(tensor: torch.Tensor, index: int, bits: int) -> None:
    pattern = struct.pack("<I" if tensor.element_size() == 4 else "<H", bits)
    raw = tensor.view(torch.uint8)
    start = index * tensor.element_size()
    raw[start : start + len(pattern)] = torch.tensor(list(pattern), dtype=torch.uint8)


def test_isas_start_with_scalar_and_auto_is_the_last() -> None:
    assert ISAS[0] == "scalar"
    tensor = random_tensor(1000, torch.float32)
    assert scan(tensor, sum_squares=True, isa="auto").sum_squares == (
        scan(tensor, sum_squares=True, isa=ISAS[-1]).sum_squares
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_elements_are_finite_and_sum_to_zero(dtype: torch.dtype, isa: str) -> None:
    result = _core.overflow_scan(address=0, numel=0, dtype=name(dtype), sum_squares=True, isa=isa)
    assert not result.non_finite
    assert result.sum_squares == 0.0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_non_finite_pattern_is_found_at_every_place_of_a_turn(
    dtype: torch.dtype, isa: str
) -> None:
    numel = 300  # more than one turn of the widest loop, and a tail
    for index in range(numel):
        for bits in NON_FINITE_BITS[dtype]:
            tensor = torch.ones(numel, dtype=dtype)
            set_bits(tensor, index, bits)
            assert scan(tensor, isa=isa).non_finite, (index, hex(bits))
            summed = scan(tensor, isa=isa, sum_squares=True)
            assert summed.non_finite, (index, hex(bits))
            assert math.isnan(summed.sum_squares)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_16_bit_patterns_are_judged_and_squared_as_torch_does(
    dtype: torch.dtype, isa: str
) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = patterns[torch.isfinite(patterns)]
    for value in patterns[~torch.isfinite(patterns)].split(1):
        assert scan(value, isa=isa).non_finite
    for value in finite.split(1):
        result = scan(value, isa=isa, sum_squares=True)
        assert (result.non_finite, result.sum_squares) == (False, float(value.double() ** 2))
    # The vector loops, which one element does not reach: 64 copies of each pattern's group.
    for chunk in finite.split(64):
        result = scan(chunk, isa=isa, sum_squares=True)
        assert not result.non_finite
        assert result.sum_squares == pytest.approx(float(exact_sum_squares(chunk)), rel=1e-14)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [3.4e38, -3.4e38, 1e30, 1e-40, -1e-45, 0.0, -0.0])
def test_huge_and_subnormal_fp32_are_squared_without_loss(value: float, isa: str) -> None:
    tensor = torch.full((77,), value)
    result = scan(tensor, isa=isa, sum_squares=True)
    assert not result.non_finite
    assert result.sum_squares == pytest.approx(float(exact_sum_squares(tensor)), rel=1e-14, abs=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_relative_error_of_the_sum_is_that_of_double_additions(dtype: torch.dtype) -> None:
    tensor = random_tensor(200_003, dtype)
    exact = exact_sum_squares(tensor)
    error = abs(Fraction(scan(tensor, sum_squares=True).sum_squares) - exact) / exact
    assert error < Fraction(1, 10**13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_has_the_same_bits_for_every_isa_and_thread_count(dtype: torch.dtype) -> None:
    # More blocks than parts, so that parts of several blocks are exercised as well.
    tensor = random_tensor(300 * BLOCK_BYTES // dtype.itemsize + 13, dtype)
    sums = {
        scan(tensor, sum_squares=True, isa=isa, threads=threads).sum_squares
        for isa in ISAS
        for threads in (0, 1, 2, 3, 16)
    }
    assert len(sums) == 1


@settings(max_examples=examples(200), deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    offset_bytes=st.integers(0, 65),
    numel=st.integers(0, 2000),
    threads=st.sampled_from([0, 1, 2]),
)
def test_any_byte_address_and_length_gives_the_aligned_answer(
    dtype: torch.dtype, isa: str, offset_bytes: int, numel: int, threads: int
) -> None:
    tensor = random_tensor(numel, dtype)
    nbytes = numel * dtype.itemsize
    memory = torch.full((nbytes + 256,), 0xFF, dtype=torch.uint8)  # nans on both sides
    memory[offset_bytes : offset_bytes + nbytes] = tensor.view(torch.uint8)
    found = _core.overflow_scan(
        address=memory.data_ptr() + offset_bytes,
        numel=numel,
        dtype=name(dtype),
        sum_squares=True,
        threads=threads,
        isa=isa,
    )
    assert not found.non_finite
    assert found.sum_squares == scan(tensor, sum_squares=True, isa="scalar").sum_squares


@pytest.mark.parametrize("sum_squares", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_a_finding_in_any_block_reaches_the_caller(
    isa: str, threads: int, sum_squares: bool
) -> None:
    tensor = torch.zeros(40 * BLOCK_BYTES // 4 + 5)
    for index in (0, BLOCK_BYTES // 4, 20 * BLOCK_BYTES // 4 + 1, tensor.numel() - 1):
        tensor[index] = math.nan
        assert scan(tensor, isa=isa, threads=threads, sum_squares=sum_squares).non_finite
        tensor[index] = 0.0


@pytest.mark.parametrize("isa", ISAS)
def test_flushing_subnormals_in_torch_does_not_change_the_sum(isa: str) -> None:
    tensor = torch.full((100,), 1e-40)
    expected = scan(tensor, sum_squares=True, isa=isa).sum_squares
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        assert scan(tensor, sum_squares=True, isa=isa).sum_squares == expected
        assert float(torch.tensor([1e-40]) * 1.0) == 0.0, "the caller's setting was not restored"
    finally:
        torch.set_flush_denormal(False)


def test_the_sum_is_nan_unless_asked_for() -> None:
    assert math.isnan(scan(torch.ones(3)).sum_squares)


def test_other_python_threads_run_during_a_scan() -> None:
    tensor = torch.zeros(32 * 1024 * 1024)
    turns_during_scans = 0
    done = threading.Event()

    def scan_repeatedly() -> None:
        for _ in range(20):
            scan(tensor, threads=1)
        done.set()

    worker = threading.Thread(target=scan_repeatedly)
    worker.start()
    while not done.wait(0.001):
        turns_during_scans += 1
    worker.join()
    # Holding the GIL, 20 scans would let this thread in about 20 times.
    assert turns_during_scans > 40


def test_a_thread_bound_to_one_cpu_still_scans_everything() -> None:
    tensor = torch.zeros(8 * 1024 * 1024)
    tensor[-1] = math.inf
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert scan(tensor).non_finite
    finally:
        os.sched_setaffinity(0, allowed)


def test_an_isa_the_cpu_lacks_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"altivec.*available: auto, scalar"):
        scan(torch.zeros(1), isa="altivec")


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"float64.*known: float32"):
        _core.overflow_scan(address=0, numel=0, dtype="float64")


def test_address_zero_with_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="4 elements at address 0"):
        _core.overflow_scan(address=0, numel=4, dtype="float32")


def test_too_many_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="threads must be 0"):
        scan(torch.zeros(1), threads=100_000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_shape_are_scanned_as_flat_memory(dtype: torch.dtype) -> None:
    tensor = random_tensor(60, dtype).view(3, 4, 5)
    result = overflow.scan(tensor, sum_squares=True)
    assert result.sum_squares == scan(tensor.flatten(), sum_squares=True).sum_squares
    assert not overflow.scan(torch.zeros(0, 5, dtype=dtype)).non_finite


def test_a_non_contiguous_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"non-contiguous.*stride \(1, 3\)"):
        overflow.scan(torch.zeros(3, 3).t())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_a_tensor_of_another_dtype_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=name(dtype)):
        overflow.scan(torch.zeros(3, dtype=dtype))


def test_a_sparse_tensor_and_a_meta_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="sparse_coo"):
        overflow.scan(torch.zeros(3).to_sparse())
    with pytest.raises(ValueError, match="meta"):
        overflow.scan(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_squares_is_a_scalar_in_fp64(dtype: torch.dtype, fused: bool) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = overflow.sum_of_squares(values, fused=fused)
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(values.double().square().sum().item(), rel=1e-12)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_sum_of_squares_is_not_finite_where_an_element_is_not(bad: float, fused: bool) -> None:
    values = torch.ones(5000)
    values[4999] = bad
    assert not torch.isfinite(overflow.sum_of_squares(values, fused=fused))
