"""Stand-ins: `ds_tensor.data` of every absent shard, one tensor for each dtype.

They are 0-dim as in stock DeepSpeed, so that most uses of absent data raise. Elementwise operations
of a script do not raise: they read NaN, and a write, which would be lost, is detected by `check`.
"""

from __future__ import annotations

import torch

from memascend.errors import StoreError

#: Largest mark in the NaN's low bits: below the quiet bit, which arithmetic sets, in every dtype.
_MARK_MAX = 0x3F


class StandIns:
    """The stand-ins of one swapper."""

    def __init__(self) -> None:
        """Make none yet."""
        self._made: dict[torch.dtype, tuple[torch.Tensor, list[int]]] = {}

    def of(self, dtype: torch.dtype, number: int) -> torch.Tensor:
        """Return the stand-in of a dtype. The first call's `number` marks it as this model's."""
        if dtype not in self._made:
            is_float = dtype.is_floating_point or dtype.is_complex
            plain = torch.tensor(torch.inf if is_float else 1, device="cpu").to(dtype)
            raw = _bytes_of(plain)
            if is_float:
                raw[0] |= 1 + number % _MARK_MAX
            self._made[dtype] = plain, raw.tolist()
        return self._made[dtype][0]

    def check(self) -> None:
        """Check that the script has not written to an absent shard since the last check.

        Raises:
            StoreError: It has; the value is lost.
        """
        for stand_in, expected in self._made.values():
            raw = _bytes_of(stand_in)
            if raw.tolist() != expected:
                raw.copy_(torch.tensor(expected, dtype=torch.uint8, device="cpu"))
                raise StoreError(
                    "a value was written to param.ds_tensor of a parameter whose shard is on the "
                    "drive, and is lost: ds_tensor is only a placeholder then. Likely cause: the "
                    "script works on partitions, as an average of weights does. fix: change the "
                    "parameter inside deepspeed.zero.GatheredParameters([param], modifier_rank=0), "
                    "and read it inside such a context too"
                )


def _bytes_of(stand_in: torch.Tensor) -> torch.Tensor:
    return stand_in.view(1).view(torch.uint8)
