"""Formats of Adam's moments between two steps: those of our kernels, and those of other libraries.

The others are written from their published descriptions, in plain torch: moments are decoded, our
kernel steps them in fp32, and they are encoded again. So formats differ in their storage alone.
Blocks are counted in one flat tensor of all parameters. Knows neither models nor losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memascend.kernels import adam, codes

FP32, BF16, INT8, UINT8 = torch.float32, torch.bfloat16, torch.int8, torch.uint8
#: The second moment becomes the gradient's square, and the first one zero; weights stay.
_SET_SECOND = {"beta1": 0.0, "take1": 0.0, "beta2": 0.0, "take2": 1.0}
#: The first moment becomes the gradient, and the second one stays.
_SET_FIRST = {"beta1": 0.0, "take1": 1.0, "beta2": 1.0, "take2": 0.0}
_REST = {"factor": 1.0, "root_scale": 1.0, "epsilon": 1.0, "step_size": -0.0}


class Moments(Protocol):
    """Both moments of all parameters, in their format; zeros at first."""

    def step(self, **operands: Any) -> None:
        """Steps by `adam.update`, which gets the operands and these moments."""

    def put(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, rounding_key: int) -> None:
        """Encodes fp32 values into both."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives both in fp32."""


class Kept:
    """Moments that the kernel steps in their own format."""

    def __init__(self, numel: int, first: torch.dtype, second: torch.dtype) -> None:
        self._numel = numel
        self._exp_avg = torch.zeros(numel, dtype=first)
        self._exp_avg_sq = torch.zeros(numel, dtype=second)
        self._scale_share = [first, second].count(INT8) + [first, second].count(UINT8)
        count = self._scale_share * codes.scale_count(numel)
        self._scales = torch.zeros(count) if count else None

    def step(self, **operands: Any) -> None:
        """Steps codes as they are."""
        adam.update(
            exp_avg=self._exp_avg, exp_avg_sq=self._exp_avg_sq, scales=self._scales, **operands
        )

    def put(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, rounding_key: int) -> None:
        """Sets both by two steps of the kernel, each of which keeps the other."""
        weight = torch.zeros(self._numel)
        for numbers, values in ((_SET_SECOND, exp_avg_sq.sqrt()), (_SET_FIRST, exp_avg)):
            self.step(
                gradient=values,
                weight=weight,
                coefficients=adam.AdamCoefficients(**numbers, **_REST),
                rounding_key=rounding_key,
            )

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives both in fp32."""
        return self._decoded(self._exp_avg, 0), self._decoded(self._exp_avg_sq, 1)

    def _decoded(self, stored: torch.Tensor, place: int) -> torch.Tensor:
        if stored.dtype not in (INT8, UINT8):
            return stored.float().clone()
        assert self._scales is not None
        values = torch.empty(self._numel)
        codes.decode(stored, self._scales[place :: self._scale_share], values)
        return values


class Codec(Protocol):
    """The format of one moment: a code for each element, and a scale for each block."""

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives codes and scales of fp32 values, as many as whole blocks have."""

    def decode(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Gives the values that they stand for, in fp32."""


class Encoded:
    """Moments that are decoded for a step in fp32 and encoded after it."""

    def __init__(self, numel: int, first: Codec, second: Codec) -> None:
        self._first, self._second = first, second
        self.put(torch.zeros(numel), torch.zeros(numel))

    def step(self, **operands: Any) -> None:
        """Steps both in fp32."""
        exp_avg, exp_avg_sq = self.read()
        adam.update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, **operands)
        self.put(exp_avg, exp_avg_sq)

    def put(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, rounding_key: int = 0) -> None:
        """Sets both; the key is not used, since codes are the nearest."""
        self._exp_avg = self._first.encode(exp_avg)
        self._exp_avg_sq = self._second.encode(exp_avg_sq)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives both in fp32."""
        return self._first.decode(*self._exp_avg), self._second.decode(*self._exp_avg_sq)


@dataclass(frozen=True, slots=True)
class Softsign(Codec):
    """FlashOptim's first moment (arXiv 2602.23349): 2x / (1 + |x|) of the share of the largest."""

    block_numel: int

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives codes, and a scale for each block."""
        scales, share = _shares(values, self.block_numel, torch.float16)
        return (2 * share / (1 + share.abs()) * 127).round().to(INT8), scales

    def decode(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Gives the values that they stand for."""
        number = stored.float() / 127
        return (number / (2 - number.abs()) * scales.float()).view(-1)


@dataclass(frozen=True, slots=True)
class Root(Codec):
    """FlashOptim's second moment: the square root's share of the largest root."""

    block_numel: int

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives codes, and a scale for each block."""
        scales, share = _shares(values.sqrt(), self.block_numel, torch.float16)
        return (share * 255).round().to(UINT8), scales

    def decode(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Gives the values that they stand for."""
        return (stored.float() / 255 * scales.float()).square().view(-1)


class Dynamic(Codec):
    """A moment of bitsandbytes (arXiv 2110.02861): dynamic tree quantization of blocks.

    Numbers are spread evenly over each of seven powers of ten, twice as many over each next one.
    """

    def __init__(self, block_numel: int, *, is_signed: bool) -> None:
        self._block_numel = block_numel
        numbers = [torch.tensor([0.0, 1.0])]
        for power in range(7):
            count = 2 ** (power if is_signed else power + 1)
            edges = torch.linspace(0.1, 1, count + 1)
            middles = 10.0 ** (power - 6) * (edges[1:] + edges[:-1]) / 2
            numbers += [middles, -middles] if is_signed else [middles]
        self.numbers = torch.cat(numbers).sort().values
        self._borders = (self.numbers[1:] + self.numbers[:-1]) / 2

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives codes, and a scale for each block."""
        scales, share = _shares(values, self._block_numel, FP32)
        return torch.bucketize(share, self._borders).to(UINT8), scales

    def decode(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Gives the values that they stand for."""
        return (self.numbers[stored.int()] * scales).view(-1)


@dataclass(frozen=True, slots=True)
class Nearest(Codec):
    """Our codes, rounded to the nearest moment instead of at random."""

    dtype: torch.dtype

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives codes, and a scale for each block."""
        stored = torch.empty(values.numel(), dtype=self.dtype)
        scales = torch.empty(codes.scale_count(values.numel()))
        codes.encode(values, stored, scales)
        return stored, scales

    def decode(self, stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Gives the values that they stand for."""
        values = torch.empty(stored.numel())
        codes.decode(stored, scales, values)
        return values


def _shares(
    values: torch.Tensor, block_numel: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the largest magnitude of each block, as it is stored, and values as shares of it."""
    blocks = values.view(-1, block_numel)
    scales = blocks.abs().amax(1, keepdim=True).to(scale_dtype)
    least = torch.finfo(FP32).tiny
    return scales, (blocks / scales.float().clamp_min(least)).clamp(-1, 1)


#: Elements that every format has whole blocks of.
NUMEL_MULTIPLE = 256
FLASH_OPTIM, BITSANDBYTES = "FlashOptim's", "bitsandbytes'"
#: Makes the moments of so many elements. The last two are for tables of roundings alone.
FORMATS: dict[str, Callable[[int], Moments]] = {
    "fp32": lambda numel: Kept(numel, FP32, FP32),
    "bf16": lambda numel: Kept(numel, BF16, BF16),
    "int8": lambda numel: Kept(numel, INT8, UINT8),
    "int8/bf16": lambda numel: Kept(numel, INT8, BF16),
    FLASH_OPTIM: lambda numel: Encoded(numel, Softsign(32), Root(32)),
    BITSANDBYTES: lambda numel: Encoded(
        numel, Dynamic(256, is_signed=True), Dynamic(256, is_signed=False)
    ),
    f"{FLASH_OPTIM}, blocks of 128": lambda numel: Encoded(numel, Softsign(128), Root(128)),
    "int8, rounded to nearest": lambda numel: Encoded(numel, Nearest(INT8), Nearest(UINT8)),
}
