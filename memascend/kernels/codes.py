"""Moments in 8 bits: a code for each element, and an fp32 scale for every `SCALE_NUMEL` of them.

Codes of first moments are int8 (signed square roots), those of second moments uint8 (fourth roots);
`csrc/kernels/codes.hpp` has the format. The step of the optimizer is `kernels.adam`; here are the
conversions of checkpoints and accessors.

All tensors are on the host. Callable from any thread; releases the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend import _core
from memascend.base.sizes import SCALE_NUMEL
from memascend.kernels.operands import check_operand
from memascend.kernels.overflow import dtype_name

if TYPE_CHECKING:
    import torch

__all__ = ["CODE_DTYPES", "SCALE_NUMEL", "decode", "encode", "scale_count"]

#: Dtypes of codes of first and of second moments.
CODE_DTYPES = ("int8", "uint8")


def scale_count(numel: int) -> int:
    """Return the number of scales of one moment of so many elements."""
    return -(-numel // SCALE_NUMEL)


def encode(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    rounding_key: int | None = None,
    first_index: int = 0,
) -> None:
    """Set codes and scales to moments.

    The result depends on the values, `rounding_key` and `first_index` alone. With a key a code is
    rounded up or down at random, so that its expected value is the moment; a block that is encoded
    as the step would encode it takes the step's key. Decoded moments keep their codes and their
    scales, with any key and with none; a scale whose codes are all zero becomes zero.

    Args:
        values: Moments in fp32; the first of them is the first of a scale.
        codes: int8 for first moments, uint8 for second ones; as many elements.
        scales: fp32, 1-D with any stride, `scale_count(numel)` elements: every second one of the
            step's scales, `scales[::2]` for first and `scales[1::2]` for second moments.
        rounding_key: See `adam.make_rounding_key`; None rounds to the nearest moment.
        first_index: Index of the first value in its sub-group, a multiple of `SCALE_NUMEL`.

    Raises:
        ValueError: A tensor has a wrong dtype or length, is not contiguous, or not on the host; or
            `first_index` is inside a scale.
    """
    if first_index % SCALE_NUMEL != 0:
        raise ValueError(
            f"first_index is {first_index}, inside a scale; give a multiple of {SCALE_NUMEL}"
        )
    _check(values, codes, scales)
    _core.codes_encode(
        values=values.data_ptr(),
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        stride=scales.stride(0),
        numel=values.numel(),
        is_first=dtype_name(codes.dtype) == CODE_DTYPES[0],
        rounding_key=rounding_key,
        first_index=first_index,
    )


def decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Set values to the moments that codes stand for.

    Args:
        codes: int8 for first moments, uint8 for second ones; the first is the first of a scale.
        scales: As in `encode`.
        values: fp32, as many elements as the codes. All that share a NaN scale become NaN.

    Raises:
        ValueError: As in `encode`.
    """
    _check(values, codes, scales)
    _core.codes_decode(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        stride=scales.stride(0),
        values=values.data_ptr(),
        numel=values.numel(),
        is_first=dtype_name(codes.dtype) == CODE_DTYPES[0],
    )


def _check(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    check_operand("values", values, values.numel(), ("float32",))
    check_operand("codes", codes, values.numel(), CODE_DTYPES)
    count = scale_count(values.numel())
    check_operand("scales", scales, count, ("float32",), may_have_stride=True)
