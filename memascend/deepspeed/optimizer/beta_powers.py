"""Running powers of Adam's betas, rounded as DeepSpeed's compiled operator rounds them.

The operator has one power of each beta for all sub-groups: `IncrementStep` in its
`csrc/includes/cpu_adam.h`. The next step multiplies it by beta in fp32; a jump, or other betas,
compute it with pow(), which rounds differently. Releases differ in another call with the same step,
which is the next sub-group of that step:

- from 0.19.0 on the power is kept, so all sub-groups of a step have the same one;
- until 0.18.9 it is computed with pow(). So the first sub-group of a step has the product, and the
  others have pow(). The next step multiplies the power that the last of them left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.deepspeed.optimizer.plain_adam import fp32

#: Hyperparameters of a sub-group, and the number of its step.
Call = tuple[Mapping[str, Any], int]


class Operator(Protocol):
    """DeepSpeed's compiled cpu_adam."""

    def create_adam(self, *arguments: Any) -> int:
        """Create the optimizer with a number."""

    def adam_update(self, *arguments: Any) -> int:
        """Step the optimizer with a number."""

    def destroy_adam(self, number: int) -> int:
        """Destroy the optimizer with a number."""


@dataclass(slots=True)
class BetaPowers:
    """Running powers of the betas in fp32, by both rules.

    Attributes:
        beta1: The first beta, in fp32.
        beta2: The second beta, in fp32.
        recomputes: Whether another call with the same step computes the powers anew.
        power1: `beta1` to the power of `step`.
        power2: `beta2` to the power of `step`.
        step: Number of the last step.
        since: Number of the last step whose powers were computed with pow(). They are then
            known from the betas, this number and `step`.
    """

    beta1: float
    beta2: float
    recomputes: bool
    power1: float = 1.0
    power2: float = 1.0
    step: int = 0
    since: int = 0

    @classmethod
    def at_start(cls, betas: tuple[float, float], *, recomputes: bool) -> BetaPowers:
        """Return the powers of an optimizer that has just been constructed."""
        return cls(fp32(betas[0]), fp32(betas[1]), recomputes)

    def advance(self, step: int, betas: tuple[float, float]) -> None:
        """Follow one call of the operator, for one sub-group."""
        beta1, beta2 = fp32(betas[0]), fp32(betas[1])
        has_new_betas = (beta1, beta2) != (self.beta1, self.beta2)
        if not has_new_betas and step == self.step and not self.recomputes:
            return
        if not has_new_betas and step == self.step + 1:
            self.power1 = fp32(self.power1 * beta1)
            self.power2 = fp32(self.power2 * beta2)
        else:
            self.power1 = fp32(math.pow(beta1, step))
            self.power2 = fp32(math.pow(beta2, step))
            self.since = step
        self.beta1, self.beta2, self.step = beta1, beta2, step

    def follow(self, calls: Iterable[Call]) -> Iterator[BetaPowers]:
        """Follow calls of the operator; yield a copy of the powers of each."""
        for group, step in calls:
            self.advance(step, group["betas"])
            yield replace(self)


def powers_of(base: Any) -> BetaPowers | None:
    """Return the powers of an optimizer that has just been constructed; None if it is no Adam."""
    adam = adam_of(base)
    if adam is None:
        return None
    recomputes = recomputes_powers(adam.ds_opt_adam)
    return BetaPowers.at_start(adam.defaults["betas"], recomputes=recomputes)


def adam_of(base: Any) -> Any:
    """Return the DeepSpeedCPUAdam that the base optimizer is, or has beside Muon; else None."""
    found = getattr(base, "aux_optimizer", base)
    return found if type(found) is DeepSpeedCPUAdam else None


# -- the operator --------------------------------------------------------------------------------

#: Number of an optimizer for trials: DeepSpeed counts its own from 0.
TRIAL_NUMBER = -1
#: Betas for which the third powers show the rule. All powers of 0.5 are exact. Those of 0.999
#: differ in the last bit, and 1 - power is exact: it cancels all but this bit's place, so that the
#: size of the step differs by 2e-5.
TELLING_BETAS = (0.999, 0.5)


def recomputes_powers(operator: Operator) -> bool:
    """Return whether another call with the same step computes the powers anew, by trying it."""
    group = {
        "lr": 1.0,
        "betas": TELLING_BETAS,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
    }
    create_trial(operator, group, adamw=True)
    weights = []
    try:
        for step in (1, 2, 3, 3):
            weight, *moments = (torch.zeros(1, dtype=torch.float32) for _ in range(3))
            call(operator, TRIAL_NUMBER, step, group, [weight, torch.ones_like(weight), *moments])
            weights.append(weight)
    finally:
        operator.destroy_adam(TRIAL_NUMBER)
    return not torch.equal(weights[-2], weights[-1])


def create_trial(operator: Operator, group: Mapping[str, Any], *, adamw: bool) -> None:
    """Create the optimizer with TRIAL_NUMBER."""
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    operator.create_adam(TRIAL_NUMBER, *numbers, adamw, False)  # False: no line in the log


def call(
    operator: Operator,
    number: int,
    step: int,
    group: Mapping[str, Any],
    tensors: list[torch.Tensor],
) -> None:
    """Call DeepSpeed's operator as DeepSpeedCPUAdam.step does."""
    operator.adam_update(
        number,
        step,
        group["lr"],
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        group["bias_correction"],
        *tensors,
    )
