"""Weights of 24 bits: fp32 as the bf16 number that it rounds to, and a remainder of 8 bits.

A remainder counts 1/256 of the bf16 number's last place, -127 to 127 (`csrc/kernels/
remainders.hpp`). The step of the optimizer is `kernels.adam`; here are the conversions of
checkpoints and accessors.

All tensors are contiguous, on the host and of one length. Callable from any thread; releases the
GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend import _core
from memascend.kernels.operands import check_operand

if TYPE_CHECKING:
    import torch

__all__ = ["cut", "join"]


def join(rounded: torch.Tensor, remainders: torch.Tensor, weights: torch.Tensor) -> None:
    """Set weights to the numbers that pairs stand for.

    Args:
        rounded: bf16.
        remainders: int8.
        weights: fp32.

    Raises:
        ValueError: A tensor has a wrong dtype or length, is not contiguous, or not on the host.
    """
    _check(rounded, remainders, weights)
    _core.remainders_join(
        rounded=rounded.data_ptr(),
        remainders=remainders.data_ptr(),
        weights=weights.data_ptr(),
        numel=weights.numel(),
    )


def cut(
    weights: torch.Tensor,
    rounded: torch.Tensor,
    remainders: torch.Tensor,
    *,
    rounding_key: int | None = None,
    first_index: int = 0,
) -> None:
    """Set pairs to weights.

    The result depends on the weights, `rounding_key` and `first_index` alone. Weights that were
    joined give back their pair, with any key and with none.

    Args:
        weights: fp32.
        rounded: bf16, set to the weights rounded to nearest even.
        remainders: int8, set to what the weights differ by.
        rounding_key: For remainders that are rounded up or down at random, so that their expected
            value is the weight; see `adam.make_rounding_key`. None rounds to the nearest.
        first_index: Index of the first weight in its sub-group.

    Raises:
        ValueError: As in `join`.
    """
    _check(rounded, remainders, weights)
    _core.remainders_cut(
        weights=weights.data_ptr(),
        rounded=rounded.data_ptr(),
        remainders=remainders.data_ptr(),
        numel=weights.numel(),
        rounding_key=rounding_key,
        first_index=first_index,
    )


def _check(rounded: torch.Tensor, remainders: torch.Tensor, weights: torch.Tensor) -> None:
    check_operand("weights", weights, weights.numel(), ("float32",))
    check_operand("rounded", rounded, weights.numel(), ("bfloat16",))
    check_operand("remainders", remainders, weights.numel(), ("int8",))
