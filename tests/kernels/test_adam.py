"""The fused Adam step's face: what it rounds, what it refuses, and that the lock is released.

Its arithmetic is compared with DeepSpeed's in tests/deepspeed/optimizer/test_fused_adam.py.
"""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import Any

import pytest
import torch

from memascend import _core
from memascend.kernels.adam import AdamCoefficients, update

ISAS = _core.kernel_isas()
NARROW = (torch.float16, torch.bfloat16)
#: Nothing is taken of gradients or moments, so the weight stays as it is.
IDLE = {
    "factor": 1.0,
    "beta1": 1.0,
    "beta2": 1.0,
    "take1": 0.0,
    "take2": 0.0,
    "root_scale": 1.0,
    "epsilon": 1.0,
    "step_size": -0.0,  # plus which every weight is itself, -0.0 included
}


def numbers(**changed: float) -> AdamCoefficients:
    return AdamCoefficients(**(IDLE | changed))


def tile(numel: int, **changed: Any) -> dict[str, Any]:
    wide = {name: torch.zeros(numel) for name in ("weight", "exp_avg", "exp_avg_sq")}
    return wide | {"gradient": torch.ones(numel), "coefficients": numbers()} | changed


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_equal(left: torch.Tensor, right: torch.Tensor) -> None:
    """Compare bits; of a NaN only that it is one."""
    integers = torch.int32 if left.element_size() == 4 else torch.int16
    both_nan = left.isnan() & right.isnan()
    assert bool((both_nan | (left.view(integers) == right.view(integers))).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", NARROW)
def test_every_16_bit_gradient_is_widened_as_torch_does(dtype: torch.dtype, isa: str) -> None:
    # All but a few at the end are taken by vectors, those one by one.
    for values in (all_bits(dtype), all_bits(dtype)[-1003:]):
        given = tile(values.numel(), gradient=values, coefficients=numbers(beta1=0.0, take1=1.0))
        given["exp_avg"].fill_(-0.0)
        update(**given, isa=isa)
        assert_equal(given["exp_avg"], values.float())


def roundings(dtype: torch.dtype) -> torch.Tensor:
    """Every finite 16-bit number, what lies half-way to the next, and its neighbours in fp32."""
    numbers = all_bits(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values.double()
    halves = ((numbers[1:] + numbers[:-1]) / 2).float()
    around = [halves.nextafter(torch.tensor(to)) for to in (math.inf, -math.inf)]
    largest = torch.tensor([65519.996, 65520.0, 65536.0, 3.4e38, 1e-45, 1e-40, math.inf, math.nan])
    return torch.cat([numbers.float(), halves, *around, largest, -largest])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", NARROW)
def test_weights_are_rounded_to_16_bits_as_torch_does(dtype: torch.dtype, isa: str) -> None:
    values = roundings(dtype)
    for weight in (values, *values[-20:].split(1)):
        output = torch.empty(weight.numel(), dtype=dtype)
        given = tile(weight.numel(), weight=weight.clone(), output=output)
        update(**given, isa=isa)
        assert_equal(given["weight"], weight)
        assert_equal(output, weight.to(dtype))


def test_an_element_is_stepped_as_the_formula_says() -> None:
    """In exact arithmetic, to fp32's precision; a wrong operand would show in the first digit."""
    given = tile(1, weight=torch.tensor([0.5]), gradient=torch.tensor([3.0]))
    given["exp_avg"].fill_(0.25)
    given["exp_avg_sq"].fill_(2.0)
    given["coefficients"] = AdamCoefficients(
        factor=0.5,
        beta1=0.75,
        beta2=0.875,
        take1=0.25,
        take2=0.125,
        root_scale=2.0,
        epsilon=0.125,
        step_size=-0.5,
        weight_decay=-0.25,
    )
    update(**given)
    first = Fraction(1, 4) * Fraction(3, 4) + Fraction(3, 2) * Fraction(1, 4)
    second = 2 * Fraction(7, 8) + Fraction(9, 4) * Fraction(1, 8)
    assert given["exp_avg"].item() == first
    assert given["exp_avg_sq"].item() == second
    expected = 0.375 - 0.5 * float(first) / (math.sqrt(second) * 2 + 0.125)
    assert given["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_adams_decay_goes_into_the_moments() -> None:
    given = tile(9, weight=torch.full((9,), 2.0), gradient=torch.zeros(9))
    given["coefficients"] = AdamCoefficients(**IDLE | {"take1": 1.0}, gradient_decay=0.5)
    update(**given)
    assert torch.equal(given["exp_avg"], torch.ones(9))


@pytest.mark.parametrize("isa", ISAS)
def test_the_gradient_is_left_as_it_was(isa: str) -> None:
    gradient = torch.randn(1000).bfloat16()
    before = gradient.clone()
    update(**tile(1000, gradient=gradient, coefficients=numbers(factor=0.5)), isa=isa)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"weight": torch.zeros(8).double()}, "weight"),
        ({"exp_avg": torch.zeros(7)}, "exp_avg"),
        ({"exp_avg_sq": torch.zeros(16)[::2]}, "exp_avg_sq"),
        ({"gradient": torch.zeros(8).double()}, "gradient"),
        ({"output": torch.zeros(8)}, "output"),
        ({"output": torch.zeros(9).bfloat16()}, "output"),
        ({"weight": torch.zeros(8, device="meta")}, "weight"),
        ({"isa": "mmx"}, "mmx"),
        ({"tail_numel": 9}, "tail_numel"),
        ({"threads": 257}, "threads"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], word: str) -> None:
    given = tile(8) | changed
    with pytest.raises(ValueError, match=word):
        update(**given)


def test_other_threads_run_meanwhile() -> None:
    given = tile(1 << 22)
    is_over = threading.Event()
    counts = [0]

    def count() -> None:
        while not is_over.is_set():
            counts[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        for _ in range(100):
            before = counts[0]
            _core.adam_update(
                gradient=given["gradient"].data_ptr(),
                gradient_dtype="float32",
                weight=given["weight"].data_ptr(),
                exp_avg=given["exp_avg"].data_ptr(),
                exp_avg_sq=given["exp_avg_sq"].data_ptr(),
                numel=1 << 22,
                coefficients=given["coefficients"],
                threads=1,
            )
            if counts[0] > before:
                return
    finally:
        is_over.set()
        counter.join()
    pytest.fail("no other thread ran during 100 steps")
