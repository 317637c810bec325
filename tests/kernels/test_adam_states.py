"""The fused Adam step with moments in bf16: what is rounded, with which random bits, how fairly.

The bits are compared with those of the step with moments in fp32, rounded here once more in numpy.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from memascend import _core
from memascend.kernels.adam import AdamCoefficients, make_rounding_key, update
from tests.support.adam_steps import USUAL

ISAS = _core.kernel_isas()
BF16 = torch.bfloat16
KEY = make_rounding_key(1, 2, 3)
MOMENTS = ("exp_avg", "exp_avg_sq")
#: From 1 to the next number in bf16; and how far fp32's own rounding may be off, in such places.
PLACE, FP32_ERROR = 2.0**-7, 1e-4
#: Weights stay as they are, and moments too: minus zero is added to them.
IDLE = {
    "factor": 1.0,
    "beta1": 1.0,
    "beta2": 1.0,
    "take1": -0.0,
    "take2": -0.0,
    "root_scale": 1.0,
    "epsilon": 1.0,
    "step_size": -0.0,
}
#: The first moment becomes the gradient, the second its square.
COPY = IDLE | {"beta1": 0.0, "beta2": 0.0, "take1": 1.0, "take2": 1.0}


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = (numel * dtype.itemsize,)
    return torch.randint(0, 256, nbytes, generator=generator, dtype=torch.uint8).view(dtype)


def tile(numel: int, *, any_bits: bool = False) -> dict[str, Any]:
    names = ("gradient", "weight", *MOMENTS)
    if any_bits:
        values = {n: random_bits(numel, torch.float32, seed) for seed, n in enumerate(names)}
    else:
        generator = torch.Generator().manual_seed(numel)
        values = {name: torch.randn(numel, generator=generator) for name in names}
    values |= {name: values[name].to(BF16) for name in ("gradient", *MOMENTS)}
    if not any_bits:
        values["exp_avg_sq"].abs_()
    return values | {"output": torch.empty(numel, dtype=BF16)}


def step(values: dict[str, Any], numbers: dict[str, float], **options: Any) -> None:
    update(**values, coefficients=AdamCoefficients(**numbers), **options)


def part(values: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    return {name: value[begin:end] for name, value in values.items()}


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in values.items()}


def assert_equal(left: torch.Tensor, right: torch.Tensor, *what: object) -> None:
    """Compare bits; of a NaN only that it is one."""
    integers = torch.int32 if left.element_size() == 4 else torch.int16
    both_nan = left.isnan() & right.isnan()
    assert bool((both_nan | (left.view(integers) == right.view(integers))).all()), what


def mixed(words: np.ndarray) -> np.ndarray:
    """fmix32 of MurmurHash3."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def words_of(key: int, first: int, numel: int) -> np.ndarray:
    numbers = (np.arange(numel, dtype=np.uint64) + np.uint64(first)).astype(np.uint32)
    counted = mixed(numbers ^ np.uint32(key & 0xFFFFFFFF))
    return mixed(counted ^ np.uint32(key >> 32))


def rounded(values: torch.Tensor, random: np.ndarray) -> torch.Tensor:
    """Up in magnitude where the random bits and what is cut off carry over."""
    bits = values.numpy().view(np.uint32)
    cut = ((bits + random) >> 16).astype(np.uint16)
    cut[np.isnan(values.numpy())] = 0x7FC0
    return torch.from_numpy(cut.view(np.int16)).view(BF16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("any_bits", [False, True])
def test_it_is_the_fp32_step_whose_moments_are_rounded_last(any_bits: bool, isa: str) -> None:
    numel, first = 3000, 2**32 - 1000  # numbers of elements begin anew within it
    ours = tile(numel, any_bits=any_bits)
    theirs = copied(ours)
    theirs |= {name: theirs[name].float() for name in MOMENTS}
    step(ours, USUAL, isa=isa, rounding_key=KEY, first_index=first, tail_numel=3)
    step(theirs, USUAL, isa=isa, tail_numel=3)
    words = words_of(KEY, first, numel)
    for name in ("weight", "output"):
        assert_equal(ours[name], theirs[name], name)
    assert_equal(ours["exp_avg"], rounded(theirs["exp_avg"], words & 0xFFFF))
    assert_equal(ours["exp_avg_sq"], rounded(theirs["exp_avg_sq"], words >> 16))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cuts", [(), (4096,), (1, 4097, 40_000), (7, 8, 9, 10, 11, 70_001)])
def test_bits_depend_on_the_element_and_nothing_else(cuts: tuple[int, ...], isa: str) -> None:
    numel, first = 3 * 32_768 + 77, 12_345
    expected = tile(numel, any_bits=True)
    ours = copied(expected)
    options: dict[str, Any] = {"rounding_key": KEY}
    step(expected, USUAL, isa="scalar", threads=1, first_index=first, **options)
    edges = (0, *cuts, numel)
    for threads, (begin, end) in enumerate(itertools.pairwise(edges), 1):
        given = part(ours, begin, end)
        step(given, USUAL, isa=isa, threads=threads, first_index=first + begin, **options)
    for name in ("weight", "output", *MOMENTS):
        assert_equal(ours[name], expected[name], name)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_a_bf16_number_already_stays_itself(isa: str) -> None:
    """NaN, infinity, both zeros and denormals among them."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    for key in range(20):
        given = tile(every.numel()) | {"gradient": torch.ones(every.numel())}
        given |= {name: every.clone() for name in MOMENTS}
        step(given, IDLE, isa=isa, rounding_key=make_rounding_key(key))
        for name in MOMENTS:
            assert_equal(given[name], every, key, name)


@pytest.mark.parametrize("isa", ISAS)
def test_a_number_becomes_one_of_its_neighbours_of_the_same_sign(isa: str) -> None:
    values = random_bits(1 << 16, torch.float32, 5)
    values = values[~values.isnan()]
    given = tile(values.numel()) | {"gradient": values}
    given["exp_avg"].zero_()
    step(given, COPY, isa=isa, rounding_key=KEY)
    found = given["exp_avg"].view(torch.int16).int() & 0xFFFF
    below = (values.view(torch.int32) >> 16) & 0xFFFF
    is_exact = (values.view(torch.int32) & 0xFFFF) == 0
    steps = found - below
    assert torch.equal(given["exp_avg"].signbit(), values.signbit())
    assert set(steps.tolist()) == {0, 1}
    assert not steps[is_exact].any()


def made(value: float, numel: int, key: int) -> dict[str, torch.Tensor]:
    """Each of the moments, where a gradient brings it to `value` before it is rounded."""
    given = tile(numel)
    gradient = {"exp_avg": value, "exp_avg_sq": value**0.5}
    found = {}
    for name in MOMENTS:
        given["gradient"] = torch.full((numel,), gradient[name])
        step(given, COPY, rounding_key=key)
        found[name] = given[name].double()
    return found


def bound_of(share: float, draws: int) -> float:
    """Five standard deviations of the mean of so many draws, in last places.

    Truncating is off by `share` of a last place, rounding to nearest by its distance to 0 or 1.
    """
    bound: float = 5 * (share * (1 - share) / draws) ** 0.5
    assert bound < min(share, 1 - share) / 2
    return bound


@pytest.mark.parametrize("share", [0.03, 0.3, 0.5, 0.9])
def test_the_mean_over_many_elements_is_the_number(share: float) -> None:
    numel = 1 << 14
    value = 1 + share * PLACE
    for name, found in made(value, numel, KEY).items():
        assert set(found.tolist()) == {1.0, 1 + PLACE}
        error = (found.mean().item() - value) / PLACE
        assert abs(error) < bound_of(share, numel) + FP32_ERROR, name


def test_the_mean_over_many_steps_is_the_number() -> None:
    share, draws = 0.3, 1000
    value = 1 + share * PLACE
    found = [made(value, 1, make_rounding_key(number)) for number in range(draws)]
    for name in MOMENTS:
        mean = sum(each[name].item() for each in found) / draws
        assert abs(mean - value) / PLACE < bound_of(share, draws) + FP32_ERROR, name


def test_the_two_moments_are_rounded_independently() -> None:
    found = made(1 + PLACE / 2, 1 << 16, KEY)
    both = (found["exp_avg"] > 1) & (found["exp_avg_sq"] > 1)
    assert both.double().mean().item() == pytest.approx(0.25, abs=0.01)


def test_changes_that_rounding_to_nearest_would_lose_are_kept_in_the_mean() -> None:
    """As a second moment goes to 2 by a thousandth a step, where 1 has 1/128 to the next number."""
    numel, count = 1 << 12, 300
    numbers = IDLE | {"beta2": 0.999, "take2": 0.001}
    given = tile(numel) | {"gradient": torch.full((numel,), 2.0**0.5)}
    given["exp_avg_sq"].fill_(1.0)
    nearest = torch.ones(1, dtype=BF16)
    for number in range(count):
        step(given, numbers, rounding_key=make_rounding_key(number))
        nearest = (nearest.float() * 0.999 + 0.002).to(BF16)
    expected = 2 - 0.999**count
    assert nearest.item() == 1.0
    assert given["exp_avg_sq"].double().mean().item() == pytest.approx(expected, abs=0.005)


def test_a_key_differs_with_every_number_and_their_order() -> None:
    keys = {
        make_rounding_key(first, second, third)
        for first in range(20)
        for second in range(20)
        for third in range(20)
    }
    assert len(keys) == 8000
    assert all(0 <= key < 1 << 64 for key in keys)
    # A run that is resumed with a later version goes on as it would have.
    assert make_rounding_key() == 0
    assert make_rounding_key(0) == 0xE220A8397B1DCDAF  # SplitMix64's first from seed 0


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"exp_avg": torch.zeros(8)}, "exp_avg_sq"),
        ({"exp_avg_sq": torch.zeros(8)}, "exp_avg_sq"),
        ({name: torch.zeros(8).half() for name in MOMENTS}, "exp_avg"),
        ({name: torch.zeros(7).to(BF16) for name in MOMENTS}, "exp_avg"),
    ],
)
def test_moments_that_do_not_fit_are_refused_by_name(changed: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        step(tile(8) | changed, IDLE)
