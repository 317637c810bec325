"""Forms of low bits: both parts give back weights as near as the form says."""

from __future__ import annotations

import pytest
import torch

from memascend.kernels.halves import flag_bytes
from memascend.streaming.optimizer.low_bits import HIGH_DTYPE, LowBits

NUMEL = 10_000
#: Half of the distance between two numbers that can be stored, by form.
NEAREST = {
    **dict.fromkeys((LowBits.FLAGGED, LowBits.BITS), 0.0),
    LowBits.UNFLAGGED: 2.0**-23,
    LowBits.REMAINDERS: 2.0**-15,
}


def parts(form: LowBits) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(NUMEL, dtype=HIGH_DTYPE), torch.empty(NUMEL, dtype=form.dtype)


@pytest.mark.parametrize("form", LowBits)
def test_cut_weights_are_joined_to_the_nearest_that_the_form_has(form: LowBits) -> None:
    weights = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    high, low = parts(form)
    form.cut(weights, high, low)
    joined = torch.empty(NUMEL)
    form.join(high, low, None, joined)
    assert torch.allclose(joined, weights, rtol=NEAREST[form], atol=0)
    assert torch.equal(joined, weights) == (form is not LowBits.REMAINDERS)
    # High halves are rounded, unless flags would have to tell how.
    assert torch.equal(high, joined.to(HIGH_DTYPE)) == (not form.has_flags)
    again = parts(form)
    form.cut(joined, *again)
    assert torch.equal(again[0], high)
    assert torch.equal(again[1], low)


@pytest.mark.parametrize("form", LowBits)
def test_low_bits_of_zero_are_the_parameter_itself(form: LowBits) -> None:
    high = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(HIGH_DTYPE)
    joined = torch.empty(NUMEL)
    form.join(high, torch.zeros(NUMEL, dtype=form.dtype), None, joined)
    assert torch.equal(joined, high.float())


@pytest.mark.parametrize("form", [LowBits.BITS, LowBits.UNFLAGGED, LowBits.REMAINDERS])
def test_rounded_parts_are_joined_from_any_flag_on(form: LowBits) -> None:
    bits = (torch.arange(NUMEL, dtype=torch.int32) % 128 + 0x3F80) << 16 | 0x8000  # ties
    weights = bits.view(torch.float32)
    high, low = parts(form)
    flags = torch.full((flag_bytes(NUMEL),), 0x5A, dtype=torch.uint8)
    form.cut_rounded(weights, high, low, flags)
    first, count = 13, 100
    joined = torch.empty(count)
    part = flags[first // 8 :].narrow(0, 0, flag_bytes(first % 8 + count))
    given = part if form is LowBits.BITS else None
    form.join(high[first:][:count], low[first:][:count], given, joined, first_flag=first % 8)
    expected = weights[first:][:count]
    assert torch.allclose(joined, expected, rtol=NEAREST[form], atol=0)
    assert torch.equal(joined, expected) == (form is LowBits.BITS)
    if form is LowBits.BITS:
        assert torch.equal(high, weights.to(HIGH_DTYPE))


def test_the_sizes_on_the_drive() -> None:
    assert {form.name: form.dtype.itemsize for form in LowBits} == {
        "FLAGGED": 2,
        "BITS": 2,
        "UNFLAGGED": 2,
        "REMAINDERS": 1,
    }
