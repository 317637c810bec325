"""Moments to codes and back: what checkpoints and accessors do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend.kernels import codes
from memascend.kernels.adam import make_rounding_key

FIRST, SECOND = torch.int8, torch.uint8
KEY = make_rounding_key(5)


def values_of(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 1e-3
    return values if dtype == FIRST else values.square()


def encoded(
    values: torch.Tensor, dtype: torch.dtype, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.empty(values.numel(), dtype=dtype)
    scales = torch.empty(codes.scale_count(values.numel()))
    codes.encode(values, found, scales, **options)
    return found, scales


def decoded(found: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.empty(found.numel())
    codes.decode(found, scales, values)
    return values


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=str)
def test_codes_stand_for_what_the_format_says(dtype: torch.dtype) -> None:
    every = torch.arange(-127, 128).to(FIRST) if dtype == FIRST else torch.arange(256).to(SECOND)
    scales = torch.tensor([0.5, 2.0**-9])
    each = scales.repeat_interleave(128)[: every.numel()]
    number = every.float()
    expected = number * number.abs() * each if dtype == FIRST else (number * number * each).square()
    assert torch.equal(decoded(every, scales), expected)


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=str)
@pytest.mark.parametrize("key", [None, 0, KEY])
def test_what_was_decoded_keeps_its_codes_and_scales(dtype: torch.dtype, key: int | None) -> None:
    for seed in range(20):
        first = encoded(values_of(1000, dtype, seed), dtype, rounding_key=seed)
        again = encoded(decoded(*first), dtype, rounding_key=key)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=str)
def test_every_scale_is_the_one_of_its_largest_moment(dtype: torch.dtype) -> None:
    """Mantissas at random, and those at both ends; a product that is rounded would miss some."""
    count = 1 << 16
    mantissas = torch.randint(1 << 23, (count,), generator=torch.Generator().manual_seed(0))
    ends = torch.arange(count // 4)
    mantissas[: count // 4], mantissas[-count // 4 :] = ends, (1 << 23) - 1 - ends
    exponents = torch.arange(count) % 60 + 90
    values = torch.zeros(count, codes.SCALE_NUMEL)
    values[:, 3] = (exponents << 23 | mantissas).to(torch.int32).view(torch.float32)
    first = encoded(values.flatten(), dtype)
    again = encoded(decoded(*first), dtype)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=str)
def test_without_a_key_a_code_is_the_nearest(dtype: torch.dtype) -> None:
    values = values_of(1280, dtype)
    found, scales = encoded(values, dtype)
    error = (decoded(found, scales) - values).abs()
    for shift in (-1, 1):
        moved = (found.int() + shift).clamp(
            -127 if dtype == FIRST else 1, 127 + 128 * (dtype == SECOND)
        )
        other = (decoded(moved.to(dtype), scales) - values).abs()
        assert bool((error <= other * (1 + 1e-4)).all())


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=str)
def test_the_same_key_and_index_give_the_same_codes(dtype: torch.dtype) -> None:
    values = values_of(4096, dtype)
    options: dict[str, Any] = {"rounding_key": KEY, "first_index": 4096}
    found, scales = encoded(values, dtype, **options)
    for key, index in ((KEY + 1, 4096), (KEY, 0)):
        other, _ = encoded(values, dtype, rounding_key=key, first_index=index)
        assert not torch.equal(other, found)
    half, half_scales = encoded(values[2048:], dtype, rounding_key=KEY, first_index=4096 + 2048)
    assert torch.equal(half, found[2048:])
    assert torch.equal(half_scales, scales[16:])


def test_two_moments_share_a_tensor_of_scales() -> None:
    values = [values_of(500, dtype) for dtype in (FIRST, SECOND)]
    scales = torch.full((8,), -1.0)
    found = [torch.empty(500, dtype=dtype) for dtype in (FIRST, SECOND)]
    for number in range(2):
        codes.encode(values[number], found[number], scales[number::2])
    for number, dtype in enumerate((FIRST, SECOND)):
        expected, alone = encoded(values[number], dtype)
        assert torch.equal(found[number], expected)
        assert torch.equal(scales[number::2], alone)
        again = torch.empty(500)
        codes.decode(found[number], scales[number::2], again)
        assert torch.equal(again, decoded(expected, alone))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=str)
def test_a_value_that_is_not_finite_takes_its_scale_with_it(dtype: torch.dtype, bad: float) -> None:
    values = values_of(384, dtype)
    values[130] = bad
    found, scales = encoded(values, dtype, rounding_key=KEY)
    assert scales.isnan().tolist() == [False, True, False]
    assert decoded(found, scales).isnan().nonzero().flatten().tolist() == list(range(128, 256))


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=str)
def test_zeros_have_a_scale_of_zero(dtype: torch.dtype) -> None:
    found, scales = encoded(torch.zeros(130), dtype, rounding_key=KEY)
    assert not found.any()
    assert scales.tolist() == [0.0, 0.0]
    assert not decoded(found, scales).any()


def test_nothing_is_no_error() -> None:
    assert codes.scale_count(0) == 0
    encoded(torch.zeros(0), FIRST)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"values": torch.zeros(200).double()}, "values is of dtype float64"),
        ({"codes": torch.zeros(200)}, "codes is of dtype float32; known: int8, uint8"),
        ({"codes": torch.zeros(199, dtype=FIRST)}, "codes has 199 elements, others 200"),
        ({"scales": torch.zeros(1)}, "scales has 1 elements, others 2"),
        ({"scales": torch.zeros(2).double()}, "scales is of dtype float64"),
        ({"scales": torch.zeros(2, 1)}, r"scales has shape \(2, 1\)"),
        ({"first_index": 100}, "first_index is 100, inside a scale; give a multiple of 128"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {
        "values": torch.zeros(200),
        "codes": torch.zeros(200, dtype=FIRST),
        "scales": torch.zeros(2),
    }
    codes.encode(**given)
    with pytest.raises(ValueError, match=says):
        codes.encode(**given | changed)
