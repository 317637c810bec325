"""Running powers of beta against models of both releases' operators, and the trial that tells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from packaging.version import Version

from memascend.deepspeed.optimizer.beta_powers import (
    TELLING_BETAS,
    BetaPowers,
    recomputes_powers,
)
from memascend.deepspeed.optimizer.plain_adam import fp32
from tests.support.older_operator import OlderOperator

Betas = tuple[float, float]
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.98, 0.99)]


@dataclass
class Header:
    """`IncrementStep` of `csrc/includes/cpu_adam.h`: 0.18.9's, or 0.19.8's."""

    betas: Betas
    is_older: bool
    powers: Betas = (1.0, 1.0)
    step: int = 0

    def increment(self, step: int, betas: Betas) -> None:
        betas = (fp32(betas[0]), fp32(betas[1]))
        if betas == self.betas and step == self.step and not self.is_older:
            return
        is_next = betas == self.betas and self.step + 1 == step
        self.step, self.betas = step, betas
        pairs = zip(self.powers, betas, strict=True)
        if is_next:
            first, second = (fp32(power * beta) for power, beta in pairs)
        else:
            first, second = (fp32(math.pow(beta, step)) for beta in betas)
        self.powers = (first, second)


class Operator:
    """An Adam of one element over a model of the header."""

    def __init__(self, *, is_older: bool) -> None:
        self.is_older = is_older
        self.made: dict[int, Header] = {}

    def create_adam(self, number: int, lr: float, beta1: float, beta2: float, *_: Any) -> int:
        self.made[number] = Header((fp32(beta1), fp32(beta2)), self.is_older)
        return 0

    def adam_update(
        self, number: int, step: int, lr: float, beta1: float, beta2: float, eps: float, *rest: Any
    ) -> int:
        header, (weight, gradient, first, second) = self.made[number], rest[-4:]
        header.increment(step, (beta1, beta2))
        (beta1, beta2), (power1, power2) = header.betas, header.powers
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).add_(gradient.square(), alpha=1 - beta2)
        root = second.sqrt().mul_(fp32(1 / math.sqrt(fp32(1 - power2)))).add_(eps)
        weight.add_(first / root, alpha=-lr / fp32(1 - power1))
        return 0

    def destroy_adam(self, number: int) -> int:
        del self.made[number]
        return 0


@st.composite
def orders_of_calls(draw: st.DrawFn) -> list[tuple[int, Betas]]:
    """Calls for some sub-groups in each of some steps; jumps, new betas and repeated runs too."""
    calls: list[tuple[int, Betas]] = []
    step = 0
    for _ in range(draw(st.integers(1, 12))):
        step = draw(st.one_of(st.just(step + 1), st.integers(1, 40)))
        betas = draw(st.lists(st.sampled_from(BETAS), min_size=1, max_size=4))
        if draw(st.booleans()):
            betas = [betas[0]] * len(betas)
        calls += [(step, pair) for pair in betas]
    return calls


@pytest.mark.parametrize("is_older", [False, True])
@given(calls=orders_of_calls())
def test_powers_follow_both_releases_through_any_calls(
    calls: list[tuple[int, Betas]], is_older: bool
) -> None:
    header = Header((fp32(0.9), fp32(0.999)), is_older)
    powers = BetaPowers.at_start((0.9, 0.999), recomputes=is_older)
    for step, betas in calls:
        header.increment(step, betas)
        powers.advance(step, betas)
        assert (powers.power1, powers.power2) == header.powers


def test_sub_groups_of_one_step_have_one_power_or_two() -> None:
    calls = [({"betas": (0.9, 0.999)}, step) for step in range(1, 13) for _ in range(3)]
    kept = list(BetaPowers.at_start((0.9, 0.999), recomputes=False).follow(calls))
    anew = list(BetaPowers.at_start((0.9, 0.999), recomputes=True).follow(calls))
    for step in range(1, 13):
        first, *others = anew[3 * step - 3 : 3 * step]
        assert len({one.power2 for one in kept[3 * step - 3 : 3 * step]}) == 1
        assert {one.power2 for one in others} == {fp32(fp32(0.999) ** step)}
        assert first.power2 == fp32(fp32(fp32(0.999) ** (step - 1)) * fp32(0.999))
    assert any(one.power2 != other.power2 for one, other in zip(kept, anew, strict=True))
    assert any(one.power1 != other.power1 for one, other in zip(kept, anew, strict=True))


# -- the trial -----------------------------------------------------------------------------------


def test_the_betas_of_the_trial_tell_at_the_third_step() -> None:
    betas = [fp32(beta) for beta in TELLING_BETAS]
    products = [fp32(fp32(beta * beta) * beta) for beta in betas]
    anew = [fp32(math.pow(beta, 3)) for beta in betas]
    assert products[0] != anew[0]
    assert products[1] == anew[1]  # so nothing can make up for the first
    sizes = [1 / fp32(1 - power) for power in (products[0], anew[0])]
    assert abs(sizes[0] / sizes[1] - 1) > 100 * 2.0**-24


@pytest.mark.parametrize("is_older", [False, True])
def test_the_trial_tells_both_ways_apart_and_leaves_nothing(is_older: bool) -> None:
    operator = Operator(is_older=is_older)
    assert recomputes_powers(operator) == is_older
    assert not operator.made


def test_the_trial_finds_the_way_of_the_installed_release() -> None:
    operator = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))]).ds_opt_adam
    assert recomputes_powers(operator) == (Version(deepspeed.__version__) < Version("0.19.0"))
    assert recomputes_powers(OlderOperator(operator))
