"""Formats of moments, those of other libraries by their published descriptions."""

from __future__ import annotations

from typing import Any

import pytest
import state_formats
import torch
from state_formats import FORMATS, Dynamic, Encoded, Nearest, Root, Softsign

from memascend.kernels.adam import AdamCoefficients
from tests.support.adam_steps import USUAL

NUMEL = 1024


def moments() -> tuple[torch.Tensor, torch.Tensor]:
    """Both within two powers of ten."""
    generator = torch.Generator().manual_seed(3)
    sizes = 10 ** (torch.rand(2, NUMEL, generator=generator) - 0.5)
    return sizes[0] * torch.randn(NUMEL, generator=generator).sign() * 1e-3, sizes[1] * 1e-6


def test_softsign_is_finer_where_moments_are_small() -> None:
    values = torch.tensor([1.0, 0.5, -0.25, 0.0] * 8) * 2.0**-10
    stored, scales = Softsign(32).encode(values)
    # 2x / (1 + x) of a half is two thirds, of a quarter two fifths.
    assert stored.flatten()[:4].tolist() == [127, 85, -51, 0]
    assert scales.dtype == torch.float16
    found = Softsign(32).decode(stored, scales)
    assert torch.allclose(found, values, atol=0.005 * 2.0**-10)
    assert found[0] == values[0]


def test_roots_are_stored_as_shares_of_the_largest_root() -> None:
    values = torch.tensor([4.0, 1.0, 0.25, 1e-6] * 8) * 2.0**-20
    stored, scales = Root(32).encode(values)
    assert stored.flatten()[:4].tolist() == [255, 128, 64, 0]
    assert scales.flatten().tolist() == [2.0**-9]
    assert Root(32).decode(stored, scales)[0] == values[0]


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_dynamic_code_is_the_nearest_of_256_numbers(is_signed: bool) -> None:
    codec = Dynamic(256, is_signed=is_signed)
    numbers = codec.numbers
    assert numbers.unique().numel() == 256
    assert (numbers[-1], numbers[0]) == (1, numbers[0] if is_signed else 0)
    assert bool((numbers < 0).any()) == is_signed
    # The lowest power of ten, 1e-7 to 1e-6, has one number, or two without a sign.
    smallest = numbers[numbers > 0][0].item()
    assert smallest == pytest.approx(5.5e-7 if is_signed else 3.25e-7)
    values, others = moments()
    given = values if is_signed else others
    stored, scales = codec.encode(given)
    shares = given.view(-1, 256) / scales
    nearest = (shares[..., None] - numbers).abs().amin(2)
    assert torch.allclose((numbers[stored.int()] - shares).abs(), nearest, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_moments_that_are_put_are_read(name: str) -> None:
    given = moments()
    stored = FORMATS[name](NUMEL)
    assert [values.count_nonzero() for values in stored.read()] == [0, 0]
    stored.put(*given, 7)
    for found, values in zip(stored.read(), given, strict=True):
        assert (found / values - 1).abs().max() < (0.5 if name == "bitsandbytes'" else 0.13)
        assert torch.equal(found.sign(), values.sign())


def test_a_step_of_encoded_moments_is_that_of_fp32_rounded_last() -> None:
    given, weights = moments(), [torch.ones(NUMEL), torch.ones(NUMEL)]
    ours = Encoded(NUMEL, Softsign(32), Root(32))
    ours.put(*given)
    exact = FORMATS["fp32"](NUMEL)
    exact.put(*ours.read(), 0)
    for stored, weight in zip((ours, exact), weights, strict=True):
        operands: dict[str, Any] = {"gradient": given[0] * 3, "weight": weight}
        stored.step(coefficients=AdamCoefficients(**USUAL), **operands)
    assert torch.allclose(*weights, rtol=1e-6)
    rounded = Encoded(NUMEL, Softsign(32), Root(32))
    rounded.put(*exact.read())
    for found, expected in zip(ours.read(), rounded.read(), strict=True):
        assert torch.allclose(found, expected, rtol=1e-2)


def test_nearest_codes_are_those_of_our_format() -> None:
    for values, dtype in zip(moments(), (state_formats.INT8, state_formats.UINT8), strict=True):
        codec = Nearest(dtype)
        found = codec.decode(*codec.encode(values))
        assert (found / values - 1).abs().max() < 0.05
