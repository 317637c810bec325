"""The part of master weights that is stored beside bf16 parameters, and how both become fp32.

Knows torch and the kernels; neither the store nor tiles.
"""

from __future__ import annotations

from enum import Enum, auto

import torch

from memascend.kernels import halves, remainders

#: Dtype of the parameters.
HIGH_DTYPE = torch.bfloat16


class LowBits(Enum):
    """A form of low bits."""

    #: All 16 bits that the parameter lacks: exact. Signs of second moments are flags, without which
    #: a parameter that was rounded does not tell its weight; high halves that were cut off do.
    FLAGGED = auto()
    #: The same where there are no second moments: flags are bits in a key of their own.
    BITS = auto()
    #: The same without flags: one weight in 131072 is stored as the next number.
    UNFLAGGED = auto()
    #: 8 bits: the weight is rounded to 24.
    REMAINDERS = auto()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of one weight's low bits."""
        return torch.int8 if self is LowBits.REMAINDERS else torch.int16

    @property
    def has_flags(self) -> bool:
        """Whether exact high halves are those that were cut off, and rounded ones need flags."""
        return self in (LowBits.FLAGGED, LowBits.BITS)

    def join(
        self,
        high: torch.Tensor,
        low: torch.Tensor,
        flags: torch.Tensor | None,
        weights: torch.Tensor,
        *,
        first_flag: int = 0,
    ) -> None:
        """Join both parts to fp32 weights.

        Args:
            high: bf16; rounded, unless there may be flags and none are given.
            low: In `dtype`.
            flags: Second moments whose signs are flags, or bits in uint8; None without flags.
            weights: fp32.
            first_flag: Number of the first weight's bit.
        """
        if self is LowBits.BITS and flags is not None:
            halves.join_with_bits(high, low, flags, weights, first=first_flag)
        elif self.has_flags:
            halves.join(high, low, flags, weights)
        elif self is LowBits.UNFLAGGED:
            halves.join_without_flags(high, low, weights)
        else:
            remainders.join(high, low, weights)

    def cut(self, weights: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
        """Set both parts to fp32 weights, rounded to the nearest that can be stored.

        With flags, high halves are cut off.
        """
        if self is LowBits.REMAINDERS:
            remainders.cut(weights, high, low)
            return
        halves.cut(weights, high, low)
        if self is LowBits.UNFLAGGED:
            halves.round_high_without_flags(high, low)

    def cut_rounded(
        self, weights: torch.Tensor, rounded: torch.Tensor, low: torch.Tensor, flags: torch.Tensor
    ) -> None:
        """Set both parts, and `flags` of BITS, to fp32 weights; the high ones are rounded.

        Forms with flags in second moments are cut by the step that makes these.
        """
        if self is LowBits.BITS:
            halves.cut_with_bits(weights, rounded, low, flags)
        else:
            assert not self.has_flags
            self.cut(weights, rounded, low)
