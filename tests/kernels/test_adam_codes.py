"""The fused Adam step with moments in codes and weights of 24 bits: bits, fairness, bounds.

Beside it the step with moments and weights in fp32, from the same decoded values: the codes and
remainders that are stored are its results, rounded once more by `kernels.codes` and
`kernels.remainders`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from memascend import _core
from memascend.kernels import codes, halves, remainders
from memascend.kernels.adam import AdamCoefficients, make_rounding_key, update
from tests.support.adam_steps import USUAL

ISAS = _core.kernel_isas()
BF16, FP32 = torch.bfloat16, torch.float32
KEY = make_rounding_key(1, 2, 3)
#: Dtypes of both moments.
BOTH, FIRST = (torch.int8, torch.uint8), (torch.int8, BF16)
MOMENTS = (BOTH, FIRST)
#: Dtypes of weights: whole, low halves, remainders.
WEIGHTS = (FP32, torch.int16, torch.int8)
#: The first moment becomes the gradient, the second its square; weights stay as they are.
COPY = {
    "factor": 1.0,
    "beta1": 0.0,
    "beta2": 0.0,
    "take1": 1.0,
    "take2": 1.0,
    "root_scale": 1.0,
    "epsilon": 1.0,
    "step_size": -0.0,
}


def tile(
    numel: int,
    moments: tuple[torch.dtype, torch.dtype] = BOTH,
    weights: torch.dtype = torch.int8,
    *,
    gradient: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Zero moments, whose codes and scales are zeros, and random weights and gradients."""
    generator = torch.Generator().manual_seed(numel)
    whole = torch.randn(numel, generator=generator)
    if gradient is None:
        gradient = torch.randn(numel, generator=generator).to(BF16)
    scales = codes.scale_count(numel) * (2 if moments == BOTH else 1)
    weight = torch.zeros(numel, dtype=weights)
    output = whole.to(BF16)
    if weights == FP32:
        weight.copy_(whole)
    elif weights == torch.int8:
        remainders.cut(whole, output, weight)
    return {
        "gradient": gradient,
        "weight": weight,
        "exp_avg": torch.zeros(numel, dtype=moments[0]),
        "exp_avg_sq": torch.zeros(numel, dtype=moments[1]),
        "scales": torch.zeros(scales),
        "output": output,
    }


def step(values: dict[str, Any], numbers: dict[str, float], **options: Any) -> None:
    update(**values, coefficients=AdamCoefficients(**numbers), **options)


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in values.items()}


def part(values: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The elements of a range that begins at a scale, as views."""
    each = values["scales"].numel() // codes.scale_count(values["gradient"].numel())
    first, last = (each * codes.scale_count(index) for index in (begin, end))
    found = {name: value[begin:end] for name, value in values.items() if name != "scales"}
    return found | {"scales": values["scales"][first:last]}


def decoded(values: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in fp32."""
    numel = values["gradient"].numel()
    first, second = torch.empty(numel), torch.empty(numel)
    each = 2 if values["exp_avg_sq"].dtype == torch.uint8 else 1
    codes.decode(values["exp_avg"], values["scales"][::each], first)
    if each == 2:
        codes.decode(values["exp_avg_sq"], values["scales"][1::2], second)
    else:
        second.copy_(
            values["exp_avg_sq"].abs()
            if values["weight"].dtype == torch.int16
            else values["exp_avg_sq"]
        )
    return first, second


def whole_weights(values: dict[str, Any]) -> torch.Tensor:
    weights = torch.empty(values["gradient"].numel())
    if values["weight"].dtype == FP32:
        return weights.copy_(values["weight"])
    if values["weight"].dtype == torch.int8:
        remainders.join(values["output"], values["weight"], weights)
    elif values["exp_avg_sq"].dtype == torch.uint8:
        halves.join_without_flags(values["output"], values["weight"], weights)
    else:
        halves.join(values["output"], values["weight"], values["exp_avg_sq"], weights)
    return weights


def trained(values: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """The tile after some steps with other gradients, so that no code is zero by its start."""
    generator = torch.Generator().manual_seed(steps)
    for number in range(steps):
        noise = torch.randn(values["gradient"].numel(), generator=generator)
        given = values | {"gradient": noise.to(values["gradient"].dtype)}
        step(given, USUAL, rounding_key=make_rounding_key(number), **options)
    return values


def assert_same(left: dict[str, Any], right: dict[str, Any], *what: object) -> None:
    """Compare bits; of a NaN only that it is one."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    for name in left.keys() - {"gradient"}:
        one, other = left[name], right[name]
        is_same = one.view(integers[one.element_size()]) == other.view(
            integers[other.element_size()]
        )
        if one.dtype.is_floating_point:
            is_same |= one.isnan() & other.isnan()
        assert bool(is_same.all()), (name, *what)


@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_it_is_the_fp32_step_whose_results_are_rounded_last(
    moments: tuple[torch.dtype, torch.dtype], weights: torch.dtype, isa: str
) -> None:
    numel, first_index = 128 * 9 + 45, 128 * 5
    ours = trained(tile(numel, moments, weights), 3, isa=isa)
    exp_avg, exp_avg_sq = decoded(ours)
    theirs = {
        "gradient": ours["gradient"],
        "weight": whole_weights(ours),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "output": torch.empty(numel, dtype=BF16),
    }
    step(theirs, USUAL, isa=isa)
    step(ours, USUAL, isa=isa, rounding_key=KEY, first_index=first_index)
    assert torch.equal(ours["output"], theirs["output"])
    expected = copied(ours)
    options: dict[str, Any] = {"rounding_key": KEY, "first_index": first_index}
    each = 2 if moments == BOTH else 1
    codes.encode(theirs["exp_avg"], expected["exp_avg"], expected["scales"][::each], **options)
    if moments == BOTH:
        codes.encode(
            theirs["exp_avg_sq"], expected["exp_avg_sq"], expected["scales"][1::2], **options
        )
        if weights == torch.int8:
            remainders.cut(theirs["weight"], expected["output"], expected["weight"], **options)
    if weights == torch.int16:
        assert (whole_weights(ours) - theirs["weight"]).abs().max() < 1e-6
        assert (whole_weights(ours) != theirs["weight"]).sum() <= (5 if moments == BOTH else 0)
    elif weights == FP32:
        assert torch.equal(ours["weight"], theirs["weight"])
    assert_same(ours, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_a_second_moment_in_bf16_is_that_of_a_step_without_codes(isa: str) -> None:
    numel = 700
    ours = trained(tile(numel, FIRST, FP32), 3, isa=isa)
    theirs = copied(ours) | {"exp_avg": torch.zeros(numel, dtype=BF16)}
    del theirs["scales"]
    for values in (ours, theirs):
        step(values, USUAL, isa=isa, rounding_key=KEY, first_index=256)
    assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])


@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_bits_depend_on_the_element_and_nothing_else(
    moments: tuple[torch.dtype, torch.dtype], weights: torch.dtype, isa: str
) -> None:
    numel, first_index = 3 * 32_768 + 77, 4096 * 3
    expected = tile(numel, moments, weights)
    start = copied(expected)
    options: dict[str, Any] = {"rounding_key": KEY}
    step(expected, USUAL, isa="scalar", threads=1, first_index=first_index, **options)
    step(expected, USUAL, isa="scalar", threads=1, first_index=first_index, **options)
    for threads, cuts in enumerate([(), (4096,), (8192, 40_960), (128, 65_536 + 128)], 1):
        ours = copied(start)
        for begin, end in itertools.pairwise((0, *cuts, numel)):
            given = part(ours, begin, end)
            for _ in range(2):
                step(
                    given,
                    USUAL,
                    isa=isa,
                    threads=threads,
                    first_index=first_index + begin,
                    **options,
                )
        assert_same(ours, expected, cuts)


@pytest.mark.parametrize("moments", [(FP32, FP32), (BF16, BF16)], ids=str)
@pytest.mark.parametrize("isa", ISAS)
def test_remainders_go_with_uncoded_moments(
    moments: tuple[torch.dtype, torch.dtype], isa: str
) -> None:
    """The moments are those of a step on whole weights, the output is its one."""
    numel = 1000
    ours = tile(numel, moments)
    del ours["scales"]
    theirs = copied(ours) | {"weight": whole_weights(ours)}
    options: dict[str, Any] = {"rounding_key": KEY, "first_index": 33}
    for values in (ours, theirs):
        step(values, USUAL, isa=isa, **options)
    for name in ("exp_avg", "exp_avg_sq", "output"):
        assert torch.equal(ours[name], theirs[name]), name
    if moments[0] == FP32:
        expected = torch.empty(numel, dtype=torch.int8)
        remainders.cut(theirs["weight"], theirs["output"], expected, **options)
        assert torch.equal(ours["weight"], expected)
    distance = whole_weights(ours).view(torch.int32) - theirs["weight"].view(torch.int32)
    assert distance.abs().max() <= 256


def three_sigma(low: float, high: float, value: float, draws: int) -> float:
    """Three standard deviations of the mean of so many draws that are one or the other."""
    share = (value - low) / (high - low)
    return 3 * (high - low) * (share * (1 - share) / draws) ** 0.5


DRAWS = 4096
#: Of moments relative to the largest that shares their scale.
SHARES = (0.9, 0.3, 0.02, 1e-3, 2e-5)


@pytest.mark.parametrize("share", SHARES)
def test_the_mean_of_many_roundings_is_the_moment(share: float) -> None:
    """Each scale has a largest moment, and 127 that are `share` of it."""
    numel = DRAWS * 128 // 127 + 128
    gradient = torch.full((numel,), 0.013 * share)
    gradient[::128] = 0.013
    given = tile(numel, gradient=gradient)
    step(given, COPY, rounding_key=KEY)
    is_small = torch.ones(numel, dtype=torch.bool)
    is_small[::128] = False
    for found, value in zip(decoded(given), (gradient[1], gradient[1].square()), strict=True):
        small = found[is_small][:DRAWS].double()
        low, high = small.min().item(), small.max().item()
        assert low < value.item() < high
        assert small.unique().numel() == 2
        bound = three_sigma(low, high, value.item(), DRAWS)
        # Codes are decided by 12 bits: an expected value is off by half of such a place at most.
        assert abs(small.mean().item() - value.item()) < bound + (high - low) / 8192


def test_second_moments_below_the_smallest_code_stop_there() -> None:
    gradient = torch.full((1280,), 1e-9)
    gradient[::128] = 1.0
    given = tile(1280, gradient=gradient)
    step(given, COPY, rounding_key=KEY)
    assert given["exp_avg_sq"].min() == 1


@pytest.mark.parametrize("share", [0.03, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("moments", [*MOMENTS, (FP32, FP32), (BF16, BF16)], ids=str)
def test_the_mean_of_many_roundings_is_the_weight(
    share: float, moments: tuple[torch.dtype, torch.dtype]
) -> None:
    """Weights move by a share of a place from one number of 24 bits on."""
    place = 2.0**-15  # of numbers of 24 bits from 1 to 2
    given = tile(DRAWS, moments, gradient=torch.ones(DRAWS))
    if moments not in MOMENTS:
        del given["scales"]
    given["output"].fill_(1.0)
    given["weight"].fill_(5)
    value = 1 + 5 * place + share * place
    # The step is exp_avg / (root + epsilon) = 1/2 of the step size.
    step(given, COPY | {"step_size": 2 * share * place}, rounding_key=KEY)
    found = whole_weights(given).double()
    low, high = 1 + 5 * place, 1 + 6 * place
    assert set(found.tolist()) == {low, high}
    bound = three_sigma(low, high, value, DRAWS)
    assert abs(found.mean().item() - value) < bound


def test_moments_and_weights_are_rounded_independently() -> None:
    numel = 1 << 16
    gradient = torch.full((numel,), 0.013 * 0.3)
    gradient[::128] = 0.013
    for moments in MOMENTS:
        given = tile(numel, moments, gradient=gradient)
        given["output"].fill_(1.0)
        given["weight"].zero_()
        step(given, COPY | {"step_size": 0.5 * 2.0**-15 / 0.0039 * 1.0039}, rounding_key=KEY)
        found = [*decoded(given), whole_weights(given)]
        small = torch.ones(numel, dtype=torch.bool)
        small[::128] = False
        is_up = [(each[small] > each[small].min()).double() for each in found]
        for one, other in itertools.combinations(is_up, 2):
            assert 0.05 < one.mean() < 0.95
            both = (one * other).mean().item()
            assert both == pytest.approx(one.mean().item() * other.mean().item(), abs=0.01)


@pytest.mark.parametrize("isa", ISAS)
def test_second_moments_are_never_zero_where_they_were_not(isa: str) -> None:
    generator = torch.Generator().manual_seed(4)
    numel = 128 * 64
    spread = (torch.randn(numel, generator=generator) * 12).clamp(-38, 38)
    given = tile(numel, gradient=torch.exp(spread))
    given["gradient"][::3] = 0
    for number in range(20):
        step(given, USUAL, isa=isa, rounding_key=make_rounding_key(number))
        second = decoded(given)[1]
        assert bool((second[given["gradient"] > 0] > 0).all())
        assert bool((second[::3] == 0).all())


@pytest.mark.parametrize("isa", ISAS)
def test_moments_that_only_decay_stay_above_zero(isa: str) -> None:
    """Down to numbers that no scale can have."""
    given = tile(256, gradient=torch.full((256,), 1e-15))
    step(given, USUAL, isa=isa, rounding_key=KEY)
    given["gradient"] = torch.zeros(256)
    for number in range(50):
        step(given, USUAL | {"beta2": 0.1}, isa=isa, rounding_key=make_rounding_key(number))
    first, second = decoded(given)
    assert bool((second > 0).all())
    assert bool(first.isfinite().all())
    assert not given["scales"].isnan().any()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
def test_a_scale_with_a_moment_that_is_not_finite_is_lost_alone(
    moments: tuple[torch.dtype, torch.dtype], isa: str, bad: float
) -> None:
    numel, at = 128 * 3 + 20, 128 + 7
    given = trained(tile(numel, moments), 2, isa=isa)
    expected = copied(given)
    given["gradient"][at] = bad
    for values in (given, expected):
        step(values, USUAL, isa=isa, rounding_key=KEY)
    is_hit = torch.zeros(numel, dtype=torch.bool)
    is_hit[128:256] = True
    for found, right in zip(decoded(given), decoded(expected), strict=True):
        assert torch.equal(found[~is_hit], right[~is_hit])
    first, second = decoded(given)
    assert bool(first[is_hit].isnan().all())
    assert not given["exp_avg"][is_hit].any()
    if moments == BOTH:
        assert bool(second[is_hit].isnan().all())
        assert not given["exp_avg_sq"][is_hit].any()
    else:
        assert not bool(second[at].isfinite())
    others = torch.arange(numel) != at
    assert torch.equal(given["weight"][others], expected["weight"][others])
    assert not bool(whole_weights(given)[at].isfinite())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
def test_a_scale_of_zeros_stays_zero_and_begins_to_move(
    moments: tuple[torch.dtype, torch.dtype], isa: str
) -> None:
    numel = 128 * 2 + 3
    given = tile(numel, moments, gradient=torch.zeros(numel))
    before = copied(given)
    step(given, USUAL | {"weight_decay": 0.0}, isa=isa, rounding_key=KEY)
    assert_same(given, before)
    given["gradient"] = torch.ones(numel)
    step(given, USUAL, isa=isa, rounding_key=KEY)
    first, second = decoded(given)
    assert torch.allclose(first, torch.full((numel,), 0.1 / 3), rtol=1e-6)
    assert torch.allclose(second, torch.full((numel,), 0.001 / 9), rtol=5e-3)


@pytest.mark.parametrize("moments", MOMENTS, ids=str)
def test_second_moments_follow_where_gradients_fall_to_a_tenth(
    moments: tuple[torch.dtype, torch.dtype],
) -> None:
    """Every other gradient falls, and the largest of its scale does not.

    With rounding to nearest these second moments would stay nearly as they were: the root 3.9 times
    too large.
    """
    generator = torch.Generator().manual_seed(7)
    numel, steps = 128 * 80, 3000
    sizes = torch.exp(torch.randn(numel, generator=generator) * 0.3) * 1e-4
    given = tile(numel, moments, weights=FP32, gradient=sizes.clone())
    step(given, COPY, rounding_key=KEY)
    exact = sizes.double().square()
    sizes[::2] *= 0.1
    numbers = USUAL | {"factor": 1.0}
    for number in range(steps):
        gradient = torch.randn(numel, generator=generator) * sizes
        exact = exact * 0.999 + gradient.double().square() * 0.001
        given["gradient"] = gradient
        step(given, numbers, threads=1, rounding_key=make_rounding_key(number))
    ratio = decoded(given)[1].double() / exact
    for found in (ratio[::2], ratio[1::2]):
        assert found.mean().item() == pytest.approx(1, abs=0.01)
        assert found.sqrt().median().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("changed", "options", "says"),
    [
        ({"scales": None}, {}, "scales are missing"),
        ({"scales": torch.zeros(3)}, {}, "scales has 3 elements, others 4"),
        ({"scales": torch.zeros(4).double()}, {}, "scales is of dtype float64"),
        ({"exp_avg_sq": torch.zeros(200)}, {}, "exp_avg_sq is of dtype float32"),
        ({"exp_avg": torch.zeros(200, dtype=torch.uint8)}, {}, "exp_avg is of dtype uint8"),
        ({"output": None}, {}, "low bits alone"),
        ({"output": torch.zeros(200).half()}, {}, "output is of dtype float16"),
        ({}, {"tail_numel": 4}, "no tail, got tail_numel=4"),
        ({}, {"first_index": 64}, "first_index=64"),
        (
            {"exp_avg": torch.zeros(200), "exp_avg_sq": torch.zeros(200)},
            {},
            "scales are for moments in codes; exp_avg is float32",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    changed: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    given = tile(200)
    with pytest.raises(ValueError, match=says):
        step(given | changed, USUAL, **options)
    assert_same(given, tile(200))
