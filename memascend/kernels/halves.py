"""Weights in two halves: fp32 as the bf16 number that it rounds to, and 16 bits that it lacks.

A weight that lies half-way between two bf16 numbers, above an odd one, needs one bit more: a flag
in the sign of its second moment, which is never negative (`csrc/kernels/halves.hpp`). Joined halves
are the weight to the bit; of a NaN only that it is one. Beside second moments in codes there are no
flags: such a weight is stored as the next number. Without second moments (Muon) the flags are bits
of their own.

All tensors are contiguous, on the host and of one length. Callable from any thread; releases the
GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend import _core
from memascend.kernels.operands import check_operand
from memascend.kernels.overflow import dtype_name

if TYPE_CHECKING:
    import torch

__all__ = [
    "clear_flags",
    "cut",
    "cut_with_bits",
    "flag_bytes",
    "join",
    "join_with_bits",
    "join_without_flags",
    "round_high",
    "round_high_without_flags",
]

_WHOLE, _HIGH, _LOW, _FLAGS = ("float32",), ("bfloat16",), ("int16",), ("float32", "bfloat16")
_BITS = ("uint8",)


def join(
    rounded: torch.Tensor, low: torch.Tensor, flags: torch.Tensor | None, weights: torch.Tensor
) -> None:
    """Set weights to the numbers of their halves.

    Args:
        rounded: bf16.
        low: int16.
        flags: Second moments in fp32 or bf16 whose signs are flags; None: `rounded` was cut off,
            not rounded.
        weights: fp32.

    Raises:
        ValueError: A tensor has a wrong dtype or length, is not contiguous, or not on the host.
    """
    _check(rounded=(rounded, _HIGH), low=(low, _LOW), weights=(weights, _WHOLE))
    if flags is not None:
        _check(rounded=(rounded, _HIGH), flags=(flags, _FLAGS))
    _core.halves_join(
        rounded=rounded.data_ptr(),
        low=low.data_ptr(),
        flags=0 if flags is None else flags.data_ptr(),
        flag_dtype="float32" if flags is None else dtype_name(flags.dtype),
        weights=weights.data_ptr(),
        numel=weights.numel(),
    )


def cut(weights: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Cut weights in two: nothing is rounded.

    Args:
        weights: fp32.
        high: bf16, set to the upper bits.
        low: int16, set to the lower bits.

    Raises:
        ValueError: As in `join`.
    """
    _check(weights=(weights, _WHOLE), high=(high, _HIGH), low=(low, _LOW))
    _core.halves_cut(
        weights=weights.data_ptr(),
        high=high.data_ptr(),
        low=low.data_ptr(),
        numel=weights.numel(),
    )


def round_high(high: torch.Tensor, low: torch.Tensor, flags: torch.Tensor) -> None:
    """Round high halves that were cut off, in place, and set or clear every flag.

    Args:
        high: bf16, set to the weights rounded to nearest even.
        low: int16.
        flags: Second moments in fp32 or bf16; their signs are set.

    Raises:
        ValueError: As in `join`.
    """
    _check(high=(high, _HIGH), low=(low, _LOW), flags=(flags, _FLAGS))
    _core.halves_round_high(
        high=high.data_ptr(),
        low=low.data_ptr(),
        flags=flags.data_ptr(),
        flag_dtype=dtype_name(flags.dtype),
        numel=high.numel(),
    )


def join_without_flags(rounded: torch.Tensor, low: torch.Tensor, weights: torch.Tensor) -> None:
    """Set weights to the numbers of their halves, where second moments are in codes.

    Args:
        rounded: bf16.
        low: int16.
        weights: fp32.

    Raises:
        ValueError: As in `join`.
    """
    _check(rounded=(rounded, _HIGH), low=(low, _LOW), weights=(weights, _WHOLE))
    _core.halves_join_without_flags(
        rounded=rounded.data_ptr(),
        low=low.data_ptr(),
        weights=weights.data_ptr(),
        numel=weights.numel(),
    )


def round_high_without_flags(high: torch.Tensor, low: torch.Tensor) -> None:
    """Round high halves that were cut off, in place; one weight in 131072 becomes the next number.

    Args:
        high: bf16, set to the weights rounded to nearest even.
        low: int16; one more where a flag would be set.

    Raises:
        ValueError: As in `join`.
    """
    _check(high=(high, _HIGH), low=(low, _LOW))
    _core.halves_round_high_without_flags(
        high=high.data_ptr(), low=low.data_ptr(), numel=high.numel()
    )


def flag_bytes(numel: int) -> int:
    """Return the bytes of the flags of so many weights, as bits."""
    return -(-numel // 8)


def join_with_bits(
    rounded: torch.Tensor,
    low: torch.Tensor,
    bits: torch.Tensor,
    weights: torch.Tensor,
    *,
    first: int = 0,
) -> None:
    """Set weights to the numbers of their halves, with flags in bits: bit i % 8 of byte i // 8.

    Args:
        rounded: bf16.
        low: int16.
        bits: uint8, `flag_bytes` of `first` and all weights.
        weights: fp32.
        first: Number of the first weight's flag.

    Raises:
        ValueError: As in `join`.
    """
    _check(rounded=(rounded, _HIGH), low=(low, _LOW), weights=(weights, _WHOLE))
    check_operand("bits", bits, flag_bytes(first + weights.numel()), _BITS)
    _core.halves_join_with_bits(
        rounded=rounded.data_ptr(),
        low=low.data_ptr(),
        bits=bits.data_ptr(),
        first=first,
        weights=weights.data_ptr(),
        numel=weights.numel(),
    )


def cut_with_bits(
    weights: torch.Tensor, rounded: torch.Tensor, low: torch.Tensor, bits: torch.Tensor
) -> None:
    """Cut weights in two, with flags that are bits.

    Args:
        weights: fp32.
        rounded: bf16, set to the weights rounded to nearest even.
        low: int16, set to the lower bits.
        bits: uint8, `flag_bytes` of them; set to the flags, those behind the last to 0.

    Raises:
        ValueError: As in `join`.
    """
    _check(weights=(weights, _WHOLE), rounded=(rounded, _HIGH), low=(low, _LOW))
    check_operand("bits", bits, flag_bytes(weights.numel()), _BITS)
    _core.halves_cut_with_bits(
        weights=weights.data_ptr(),
        rounded=rounded.data_ptr(),
        low=low.data_ptr(),
        bits=bits.data_ptr(),
        numel=weights.numel(),
    )


def clear_flags(flags: torch.Tensor) -> None:
    """Take the flags out of second moments, in fp32 or bf16: no sign is left.

    Raises:
        ValueError: As in `join`.
    """
    _check(flags=(flags, _FLAGS))
    _core.halves_clear_flags(
        flags=flags.data_ptr(), flag_dtype=dtype_name(flags.dtype), numel=flags.numel()
    )


def _check(**given: tuple[torch.Tensor, tuple[str, ...]]) -> None:
    """Check tensors by their names: each has as many elements as the first."""
    ((expected, _), *_) = given.values()
    for name, (tensor, dtypes) in given.items():
        check_operand(name, tensor, expected.numel(), dtypes)
