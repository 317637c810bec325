"""Weights of 24 bits: pairs come back, and what is rounded is right in the mean.

`tests/cpp/kernels/remainders_test.cpp` tries every pair.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend.kernels import remainders
from memascend.kernels.adam import make_rounding_key

BF16 = torch.bfloat16
KEY = make_rounding_key(8)
#: Of numbers of 24 bits from 1 to 2.
PLACE = 2.0**-15


def cut(weights: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rounded = torch.empty(weights.numel(), dtype=BF16)
    found = torch.empty(weights.numel(), dtype=torch.int8)
    remainders.cut(weights, rounded, found, **options)
    return rounded, found


def joined(rounded: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    weights = torch.empty(rounded.numel())
    remainders.join(rounded, found, weights)
    return weights


@pytest.mark.parametrize("key", [None, KEY])
def test_the_high_half_is_the_weight_rounded_to_bf16(key: int | None) -> None:
    weights = torch.randn(10_000)
    rounded, found = cut(weights, rounding_key=key)
    assert torch.equal(rounded, weights.to(BF16))
    assert found.min() >= -127
    places = (joined(rounded, found).view(torch.int32) - weights.view(torch.int32)).abs()
    assert places.max() <= 256


@pytest.mark.parametrize("key", [None, KEY])
def test_joined_weights_give_back_their_pair(key: int | None) -> None:
    pair = cut(torch.randn(10_000), rounding_key=1)
    again = cut(joined(*pair), rounding_key=key)
    assert all(map(torch.equal, pair, again))


def test_without_a_key_a_weight_is_the_nearest() -> None:
    weights = 1 + PLACE * torch.tensor([0.25, 0.75, 5.5, -0.25 / 2])
    assert joined(*cut(weights)).tolist() == [1.0, 1 + PLACE, 1 + 6 * PLACE, 1.0]


@pytest.mark.parametrize("share", [0.03, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_mean_of_many_roundings_is_the_weight(share: float, sign: int) -> None:
    draws = 4096
    value = sign * (1 + (9 + share) * PLACE)
    found = joined(*cut(torch.full((draws,), value), rounding_key=KEY)).double()
    assert set(found.abs().tolist()) == {1 + 9 * PLACE, 1 + 10 * PLACE}
    bound = 3 * PLACE * (share * (1 - share) / draws) ** 0.5
    assert abs(found.mean().item() - value) < bound + PLACE / 512


def test_a_key_and_an_index_give_the_same_remainders() -> None:
    weights = torch.randn(1000)
    _, found = cut(weights, rounding_key=KEY, first_index=77)
    _, half = cut(weights[500:], rounding_key=KEY, first_index=577)
    _, other = cut(weights, rounding_key=KEY + 1, first_index=77)
    assert torch.equal(found[500:], half)
    assert not torch.equal(found, other)


def test_zeros_infinities_and_nan_stay_themselves() -> None:
    weights = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-45, float("nan")])
    for key in (None, *range(20)):
        found = joined(*cut(weights, rounding_key=key))
        assert torch.equal(found[:4].view(torch.int32), weights[:4].view(torch.int32))
        assert 0 <= found[4] < 1e-40
        assert found[5].isnan()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"weights": torch.zeros(4).double()}, "weights is of dtype float64"),
        ({"rounded": torch.zeros(4).half()}, "rounded is of dtype float16; known: bfloat16"),
        ({"remainders": torch.zeros(4, dtype=torch.uint8)}, "remainders is of dtype uint8"),
        ({"remainders": torch.zeros(3, dtype=torch.int8)}, "remainders has 3 elements, others 4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {
        "weights": torch.zeros(4),
        "rounded": torch.zeros(4, dtype=BF16),
        "remainders": torch.zeros(4, dtype=torch.int8),
    }
    for call in (remainders.cut, remainders.join):
        call(**given)
        with pytest.raises(ValueError, match=says):
            call(**given | changed)
