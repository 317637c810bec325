"""Stand-ins: `ds_tensor.data` of every shard that is absent, one tensor for each dtype.

0-dim as in stock DeepSpeed, so that most uses of absent data fail loudly. Elementwise operations of
a script do not: what they read is NaN, and what they write is found out here, since it would be
lost.
"""

from __future__ import annotations

import torch

from memascend.errors import StoreError

#: Low bits of the NaN: fewer than its quiet bit, which any arithmetic sets, in every format.
_MARK_MAX = 0x3F


class StandIns:
    """The stand-ins of one swapper."""

    def __init__(self) -> None:
        """Begin with none."""
        self._made: dict[torch.dtype, tuple[torch.Tensor, list[int]]] = {}

    def of(self, dtype: torch.dtype, number: int) -> torch.Tensor:
        """Return the stand-in of a dtype; the first number tells it from those of other models."""
        if dtype not in self._made:
            is_float = dtype.is_floating_point or dtype.is_complex
            plain = torch.tensor(torch.inf if is_float else 1, device="cpu").to(dtype)
            raw = _bytes_of(plain)
            if is_float:
                raw[0] |= 1 + number % _MARK_MAX
            self._made[dtype] = plain, raw.tolist()
        return self._made[dtype][0]

    def check(self) -> None:
        """Refuse to go on after a script has written to an absent shard; once for each time.

        Raises:
            StoreError: It has, since the last check.
        """
        for stand_in, expected in self._made.values():
            raw = _bytes_of(stand_in)
            if raw.tolist() != expected:
                raw.copy_(torch.tensor(expected, dtype=torch.uint8, device="cpu"))
                raise StoreError(
                    "a value was written to param.ds_tensor of a parameter whose shard is on the "
                    "drive, and is lost: what stands there holds no value. Likely cause: the "
                    "script works on partitions, as an average of weights does. fix: change the "
                    "parameter inside deepspeed.zero.GatheredParameters([param], modifier_rank=0), "
                    "and read it inside the same"
                )


def _bytes_of(stand_in: torch.Tensor) -> torch.Tensor:
    return stand_in.view(1).view(torch.uint8)
