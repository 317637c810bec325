"""Weights in two halves: nothing is lost, and a step on halves is that on whole weights.

`make test-device` and a workflow of every night try all 2^32 weights; here are those around every
rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memascend import _core
from memascend.kernels import halves
from memascend.kernels.adam import AdamCoefficients, make_rounding_key, update

ISAS = _core.kernel_isas()
FLAGS = (torch.float32, torch.bfloat16)
GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)
#: Of the low 16 bits: all around a tie and around a carry, and some between.
LOWS = (0, 1, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF)
NUMBERS = {
    "factor": 0.37,
    "beta1": 0.9,
    "beta2": 0.999,
    "take1": 0.1,
    "take2": 0.001,
    "root_scale": 3.0,
    "epsilon": 1e-8,
    "step_size": -1e-3,
}
#: Weights move, stay, decay, or have their decay in the gradient.
CASES = (
    {},
    {"step_size": -0.0},
    {"weight_decay": -1e-3},
    {"gradient_decay": 0.1},
)


def every_high_half() -> torch.Tensor:
    """Every high half with each of LOWS, in fp32: all signs, exponents, denormals and NaNs."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([high | low for low in LOWS])
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)


def random_weights(numel: int, seed: int) -> torch.Tensor:
    """Weights of usual size; every fourth is a tie, and every third of these has an odd half."""
    generator = torch.Generator().manual_seed(seed)
    bits = (torch.randn(numel, generator=generator) * 0.02).view(torch.int32)
    bits[::4] = bits[::4] & ~0xFFFF | 0x8000
    return bits.view(torch.float32)


def split(weights: torch.Tensor, flags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Halves of weights, with the flags in place."""
    high = torch.empty(weights.numel(), dtype=torch.bfloat16)
    low = torch.empty(weights.numel(), dtype=torch.int16)
    halves.cut(weights, high, low)
    halves.round_high(high, low, flags)
    return high, low


def joined(high: torch.Tensor, low: torch.Tensor, flags: torch.Tensor | None) -> torch.Tensor:
    weights = torch.empty(high.numel())
    halves.join(high, low, flags, weights)
    return weights


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Bits are equal; of a NaN only that it is one."""
    integers = torch.int32 if one.element_size() == 4 else torch.int16
    is_nan = torch.isnan(other)
    assert torch.equal(torch.isnan(one), is_nan)
    assert torch.equal(one[~is_nan].view(integers), other[~is_nan].view(integers))


@pytest.mark.parametrize("dtype", FLAGS, ids=str)
def test_halves_that_are_joined_are_the_weight(dtype: torch.dtype) -> None:
    weights = every_high_half()
    flags = torch.rand(weights.numel()).to(dtype)
    magnitudes = flags.clone()
    high, low = split(weights, flags)
    assert_same(high, weights.bfloat16())
    assert_same(joined(high, low, flags), weights)
    is_tie = (weights.view(torch.int32) & 0x1FFFF) == 0x18000
    assert torch.equal(torch.signbit(flags), is_tie)
    assert torch.equal(flags.abs(), magnitudes)
    halves.clear_flags(flags)
    assert torch.equal(flags, magnitudes)


def test_a_tie_without_its_flag_is_another_weight() -> None:
    weights = random_weights(1000, seed=1)
    flags = torch.ones(1000)
    high, low = split(weights, flags)
    wrong = joined(high, low, flags.abs()) != weights
    assert torch.equal(wrong, torch.signbit(flags))
    assert wrong.any()


def test_halves_that_were_cut_need_no_flags() -> None:
    weights = every_high_half()
    high, low = (torch.empty(weights.numel(), dtype=d) for d in (torch.bfloat16, torch.int16))
    halves.cut(weights, high, low)
    assert torch.equal(joined(high, low, None).view(torch.int32), weights.view(torch.int32))


def test_without_flags_a_tie_above_an_odd_half_is_the_next_number() -> None:
    weights = every_high_half()
    high, low = (torch.empty(weights.numel(), dtype=d) for d in (torch.bfloat16, torch.int16))
    halves.cut(weights, high, low)
    halves.round_high_without_flags(high, low)
    found = torch.empty(weights.numel())
    halves.join_without_flags(high, low, found)
    bits = weights.view(torch.int32)
    is_tie = (bits & 0x1FFFF) == 0x18000
    assert_same(high, weights.bfloat16())
    assert_same(found, (bits + is_tie.int()).view(torch.float32))


def test_flags_may_be_bits_of_their_own() -> None:
    weights = every_high_half()[:-3]  # the last byte is not full
    high, low = (torch.empty(weights.numel(), dtype=d) for d in (torch.bfloat16, torch.int16))
    bits = torch.empty(halves.flag_bytes(weights.numel()), dtype=torch.uint8)
    halves.cut_with_bits(weights, high, low, bits)
    assert_same(high, weights.bfloat16())
    for first in (0, 1, 4099):
        found = torch.empty(weights.numel() - first)
        part = bits[first // 8 :]
        halves.join_with_bits(high[first:], low[first:], part, found, first=first % 8)
        assert_same(found, weights[first:])


def test_bits_of_another_length_are_refused() -> None:
    high, low = torch.zeros(9, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int16)
    weights = torch.zeros(9)
    with pytest.raises(ValueError, match="bits has 1 elements, others 2"):
        halves.join_with_bits(high, low, torch.zeros(1, dtype=torch.uint8), weights)
    with pytest.raises(ValueError, match="bits is of dtype int8"):
        halves.cut_with_bits(weights, high, low, torch.zeros(2, dtype=torch.int8))


def moments(numel: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(numel, generator=generator) * 1e-3
    second = torch.rand(numel, generator=generator) * 1e-6
    return {"exp_avg": first.to(dtype), "exp_avg_sq": second.to(dtype)}


def steps(given: dict[str, Any], gradients: list[torch.Tensor], **options: Any) -> None:
    for number, gradient in enumerate(gradients):
        coefficients = AdamCoefficients(**NUMBERS | CASES[number % len(CASES)])
        update(
            **given,
            gradient=gradient,
            coefficients=coefficients,
            rounding_key=make_rounding_key(number),
            **options,
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gradient_dtype", GRADIENTS, ids=str)
@pytest.mark.parametrize("dtype", FLAGS, ids=str)
def test_steps_on_halves_are_those_on_whole_weights(
    isa: str, gradient_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    numel = 40_003  # more than a block, and a rest of the vectors
    weights = random_weights(numel, seed=2)
    whole = moments(numel, dtype, seed=3) | {"weight": weights.clone()}
    whole["output"] = weights.bfloat16()
    halved = moments(numel, dtype, seed=3)
    high, low = split(weights, halved["exp_avg_sq"])
    halved |= {"weight": low, "output": high}
    gradients = [torch.randn(numel).to(gradient_dtype) for _ in CASES]
    options: dict[str, Any] = {"tail_numel": 5, "isa": isa}
    steps(whole, gradients, **options)
    steps(halved, gradients, **options)
    assert_same(joined(high, low, halved["exp_avg_sq"]), whole["weight"])
    assert_same(high, whole["output"])
    assert_same(halved["exp_avg"], whole["exp_avg"])
    halves.clear_flags(halved["exp_avg_sq"])
    assert_same(halved["exp_avg_sq"], whole["exp_avg_sq"])


@pytest.mark.parametrize("isa", ISAS)
def test_every_weight_is_whole_behind_a_step_that_leaves_it(isa: str) -> None:
    weights = every_high_half()
    state = moments(weights.numel(), torch.float32, seed=4)
    high, low = split(weights, state["exp_avg_sq"])
    still = AdamCoefficients(**NUMBERS | {"step_size": -0.0})
    gradient = torch.zeros(weights.numel(), dtype=torch.bfloat16)
    for _ in range(2):
        update(**state, weight=low, output=high, gradient=gradient, coefficients=still, isa=isa)
    assert_same(joined(high, low, state["exp_avg_sq"]), weights)


def test_bits_of_halves_do_not_depend_on_threads() -> None:
    numel = 100_000
    found = []
    for threads in (1, 3):
        state = moments(numel, torch.bfloat16, seed=5)
        high, low = split(random_weights(numel, seed=6), state["exp_avg_sq"])
        gradient = torch.linspace(-1, 1, numel)
        given = state | {"weight": low, "output": high}
        steps(given, [gradient] * 3, threads=threads)
        found.append([high, low, *state.values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"low": torch.zeros(3, dtype=torch.int16)}, "low has 3 elements, others 4"),
        ({"low": torch.zeros(4)}, "low is of dtype float32; known: int16"),
        ({"flags": torch.zeros(4, dtype=torch.float16)}, "flags is of dtype float16"),
        ({"weights": torch.zeros(8)}, "weights has 8 elements"),
        ({"rounded": torch.zeros(4)}, "rounded is of dtype float32; known: bfloat16"),
    ],
)
def test_a_tensor_that_the_core_would_misread_is_refused(given: dict[str, Any], says: str) -> None:
    well = {
        "rounded": torch.zeros(4, dtype=torch.bfloat16),
        "low": torch.zeros(4, dtype=torch.int16),
        "flags": torch.zeros(4),
        "weights": torch.zeros(4),
    }
    halves.join(**well)
    with pytest.raises(ValueError, match=says):
        halves.join(**well | given)


@pytest.mark.parametrize(
    ("output", "says"),
    [(None, "low bits alone"), (torch.zeros(4, dtype=torch.float16), "known: bfloat16")],
)
def test_a_step_on_low_halves_alone_is_refused(output: torch.Tensor | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        update(
            **moments(4, torch.float32, seed=0),
            weight=torch.zeros(4, dtype=torch.int16),
            output=output,
            gradient=torch.zeros(4),
            coefficients=AdamCoefficients(**NUMBERS),
        )


# -- all weights ---------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("isa", ISAS)
def test_all_weights_there_are(isa: str) -> None:
    """2^32 of them, behind a step that leaves them as they are: two minutes on two cores."""
    still = AdamCoefficients(**NUMBERS | {"step_size": -0.0})
    numel = 1 << 22
    gradient = torch.zeros(numel, dtype=torch.bfloat16)
    count = torch.arange(numel, dtype=torch.int32)
    for part in range(1 << 10):
        bits = count + (part << 22 if part < 1 << 9 else (part << 22) - (1 << 32))
        weights = bits.view(torch.float32)
        state = {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
        high, low = split(weights, state["exp_avg_sq"])
        update(**state, weight=low, output=high, gradient=gradient, coefficients=still, isa=isa)
        assert_same(joined(high, low, state["exp_avg_sq"]), weights)
