"""The fused step: DeepSpeedCPUAdam's step in one pass, if it gives the same bits.

DeepSpeed needs four passes: widen the gradient, multiply it, step, and round the new weight to 16
bits. The coefficients are computed in fp32 as in its C++ code (`csrc/includes/cpu_adam.h`). At the
start the bits are compared with those of the operator that DeepSpeed has compiled on this machine,
since compilers contract the scalar remainder loop differently.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.deepspeed.optimizer.plain_adam import (
    fp32,
    why_not_plain_numbers,
    why_not_plain_step,
)
from memascend.kernels.adam import (
    AdamCoefficients,
    KernelHelpers,
    make_rounding_key,
    update,
)
from memascend.plan.state_dtype import refusal
from memascend.streaming.optimizer.sub_group_step import FusedUpdate
from memascend.streaming.optimizer.tile_memory import TileShape

log = logging.getLogger(__name__)

#: Elements of a vector in DeepSpeed's operator: AVX2, AVX-512, NEON; 1: the remainder is computed
#: like a vector; the last: there are no vectors, all is remainder.
TAIL_WIDTHS = (8, 16, 4, 1, 1 << 62)
_DTYPES_16_BIT = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Seed of the stochastic rounding of bf16 moments: "memascend" on a telephone's keys.
_SEED = 636272363


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
    """Running powers of the betas in fp32, rounded as DeepSpeed's optimizer rounds them.

    The next step multiplies them by beta; a jump or new betas compute them with pow().
    """

    beta1: float
    beta2: float
    power1: float = 1.0
    power2: float = 1.0
    step: int = 0

    @classmethod
    def at_start(cls, betas: tuple[float, float]) -> BetaPowers:
        """Return the powers of an optimizer that has just been constructed."""
        return cls(fp32(betas[0]), fp32(betas[1]))

    def advance(self, step: int, betas: tuple[float, float]) -> None:
        """Set the powers to those of `step`: the next, the same, or any other."""
        beta1, beta2 = fp32(betas[0]), fp32(betas[1])
        has_new_betas = (beta1, beta2) != (self.beta1, self.beta2)
        if not has_new_betas and step == self.step:
            return
        if not has_new_betas and step == self.step + 1:
            self.power1 = fp32(self.power1 * beta1)
            self.power2 = fp32(self.power2 * beta2)
        else:
            self.power1 = fp32(math.pow(beta1, step))
            self.power2 = fp32(math.pow(beta2, step))
        self.beta1, self.beta2, self.step = beta1, beta2, step

    def coefficients(
        self, group: Mapping[str, Any], factor: float, *, adamw: bool
    ) -> AdamCoefficients:
        """Return the coefficients of this step; betas are below 1."""
        rate, decay = fp32(group["lr"]), fp32(group["weight_decay"])
        correction1 = root_scale = 1.0
        if group["bias_correction"]:
            correction1 = fp32(1.0 - self.power1)
            root_scale = fp32(1.0 / fp32(math.sqrt(fp32(1.0 - self.power2))))
        decays = decay > 0
        return AdamCoefficients(
            factor=factor,
            beta1=self.beta1,
            beta2=self.beta2,
            take1=fp32(1.0 - self.beta1),
            take2=fp32(1.0 - self.beta2),
            root_scale=root_scale,
            epsilon=group["eps"],
            step_size=-rate / correction1,
            gradient_decay=decay if decays and not adamw else None,
            weight_decay=-rate * decay if decays and adamw else None,
        )


class FusedAdam:
    """Fused steps of one DeepSpeedCPUAdam, and its running powers."""

    def __init__(
        self,
        optimizer: Any,
        tail_width: int,
        state_dtype: torch.dtype = torch.float32,
        rank: int = 0,
        *,
        is_needed: bool,
    ) -> None:
        """Take an optimizer that has not made a step yet.

        Args:
            optimizer: DeepSpeedCPUAdam.
            tail_width: Result of `find_tail_width`.
            state_dtype: Dtype of its moments.
            rank: Rank of this process.
            is_needed: Raise if a step cannot be fused, instead of leaving it to the optimizer.
        """
        self._optimizer = optimizer
        self._tail_width = tail_width
        self._state_dtype = state_dtype
        self._rank = rank
        self._is_needed = is_needed
        self._powers = BetaPowers.at_start(optimizer.defaults["betas"])
        self._nothing = [torch.empty(0) for _ in range(4)]
        self._helpers = KernelHelpers()  # joined when this object is freed
        #: Whether steps may be fused: until the optimizer has made one by itself, since its running
        #: powers are then unknown.
        self.is_fused = True

    def advance(self, step: int, betas: tuple[float, float]) -> None:
        """Set the running powers to a step for which the operator was called elsewhere."""
        self._powers.advance(step, betas)

    def of(
        self,
        group: Mapping[str, Any],
        values: Mapping[str, Any],
        states: Mapping[str, torch.dtype],
        sub_group: int = 0,
    ) -> FusedUpdate | None:
        """Return the update of a sub-group's tiles; None if the optimizer must step by itself.

        Args:
            group: Current hyperparameters of the sub-group.
            values: The optimizer's state of the sub-group.
            states: Dtypes of its state tensors.
            sub_group: Its number; selects the random bits that round moments in bf16.

        Raises:
            ConfigError: The optimizer must step by itself, and fused steps are needed.
        """
        reason = self.why_not(group, values, states)
        if not reason:
            return partial(self._update, dict(group), sub_group)
        if self._is_needed:
            raise refusal(reason, "Change that")
        self.is_fused = False
        return None

    def early(self, coming: Iterable[tuple[Mapping[str, Any], int]]) -> list[FusedUpdate]:
        """Return the updates of a step that DeepSpeed may still skip.

        Neither this call nor the updates change the optimizer.

        Args:
            coming: (hyperparameters, number of the step) for each sub-group, in order.
        """
        powers, updates = replace(self._powers), list[FusedUpdate]()
        for sub_group, (group, step) in enumerate(coming):
            powers.advance(step, group["betas"])
            updates.append(partial(self._apply, dict(group), sub_group, replace(powers)))
        return updates

    def why_not(
        self,
        group: Mapping[str, Any],
        values: Mapping[str, Any],
        states: Mapping[str, torch.dtype],
    ) -> str:
        """Return why the optimizer must step by itself; empty if a fused step can replace it."""
        if states != dict.fromkeys(MOMENTS, self._state_dtype):
            return f"its states are {dict(states)}, not {MOMENTS} in {self._state_dtype}"
        if type(values.get("step")) is not int:
            return f"its count of steps is {values.get('step')!r}, not a whole number"
        return why_not_plain_numbers(group) or why_not_plain_step(self._optimizer)

    def _update(
        self,
        group: Mapping[str, Any],
        sub_group: int,
        *,
        values: MutableMapping[str, Any],
        **tensors: Any,
    ) -> None:
        """Step, and advance the optimizer's count of steps and running powers."""
        values["step"] += 1
        self.advance(values["step"], group["betas"])
        optimizer = self._optimizer
        # On empty tensors: advances the operator's powers, since it may make a later step itself.
        _step_stock(optimizer.ds_opt_adam, optimizer.opt_id, values["step"], group, self._nothing)
        self._apply(group, sub_group, self._powers, values=values, **tensors)

    def _apply(
        self,
        group: Mapping[str, Any],
        sub_group: int,
        powers: BetaPowers,
        *,
        begin: int,
        gradient: torch.Tensor,
        factor: float,
        weight: torch.Tensor,
        values: MutableMapping[str, Any],
        output: torch.Tensor | None,
    ) -> None:
        adamw = self._optimizer.adam_w_mode
        update(
            gradient=gradient,
            weight=weight,
            exp_avg=values["exp_avg"],
            exp_avg_sq=values["exp_avg_sq"],
            output=output,
            coefficients=powers.coefficients(group, factor, adamw=adamw),
            tail_numel=gradient.numel() % self._tail_width,
            rounding_key=make_rounding_key(_SEED, powers.step, sub_group, self._rank),
            first_index=begin,
            helpers=self._helpers,
        )


class OwnSteps:
    """An optimizer that makes every step by itself: nothing is fused."""

    is_fused = False

    def advance(self, step: int, betas: tuple[float, float]) -> None:
        """Do nothing: there are no running powers."""

    def of(self, *_: Any) -> None:
        """Return no update."""


def fused_adam(
    optimizer: Any, shape: TileShape, rank: int = 0, *, is_needed: bool = False
) -> FusedAdam | OwnSteps:
    """Return the fused steps of an optimizer, or its own ones.

    Args:
        optimizer: Any optimizer; only a DeepSpeedCPUAdam without steps so far can be fused.
        shape: Dtypes of its tiles.
        rank: Rank of this process; selects the random bits that round moments in bf16.
        is_needed: Whether the block asks for moments in bf16, which need fused steps. The dtype
            in `shape` cannot tell: it is bf16 too if DeepSpeed itself keeps states in bf16.

    Raises:
        ConfigError: Fused steps are needed and not possible.
    """
    reason = _why_not_fused(optimizer, shape, is_needed=is_needed)
    if not reason:
        tail_width = find_tail_width(optimizer, shape)
        if tail_width is not None:
            return FusedAdam(optimizer, tail_width, shape.state_dtype, rank, is_needed=is_needed)
        reason = "on this machine DeepSpeed's operator gives other bits"
    if is_needed:
        raise refusal(reason, "Change that")
    if type(optimizer) is DeepSpeedCPUAdam and dist.get_rank() == 0:
        log.info("memascend: the optimizer's own step is used, not the fused one: %s", reason)
    return OwnSteps()


def _why_not_fused(optimizer: Any, shape: TileShape, *, is_needed: bool) -> str:
    """Return why an optimizer must make every step by itself; empty if it need not."""
    kind = type(optimizer)
    if kind is not DeepSpeedCPUAdam:
        return f"the optimizer is {kind.__module__}.{kind.__qualname__}"
    if optimizer.state:
        return "it has made steps before"
    if not _has_kernel(shape):
        return f"there is no kernel for weights of {shape.master_dtype}"
    reason = next(filter(None, map(why_not_plain_numbers, optimizer.param_groups)), "")
    if not reason and is_needed:
        reason = why_not_plain_step(optimizer)
    return reason


def _has_kernel(shape: TileShape) -> bool:
    narrow = (torch.float32, *_DTYPES_16_BIT)
    return (
        shape.master_dtype == torch.float32
        and shape.gradient_dtype in narrow
        and shape.parameter_dtype in narrow
    )


# -- the check -----------------------------------------------------------------------------------

#: Has whole vectors and a remainder for every width in TAIL_WIDTHS.
_NUMEL = 5 * 64 + 15
#: DeepSpeed numbers its optimizers from 0.
_TRIAL_NUMBER = -1
#: Consecutive steps, a repeated one, and a jump, as after loading a checkpoint.
_STEPS = (1, 2, 2, 3, 1000, 1001)


def find_tail_width(optimizer: Any, shape: TileShape) -> int | None:
    """Return the vector width for which fused steps equal DeepSpeed's bits; None if none does.

    Args:
        optimizer: A DeepSpeedCPUAdam; not stepped.
        shape: Dtypes of its tiles.
    """
    for width in TAIL_WIDTHS:
        if all(
            _are_equal(ours, theirs)
            for group in _groups_to_try(optimizer)
            for ours, theirs in _steps_of_both(optimizer, group, shape, width)
        ):
            return width
    return None


def _groups_to_try(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the optimizer's own hyperparameters, and some that a scheduler may set."""
    for group in optimizer.param_groups:
        own = {name: value for name, value in group.items() if name != "params"}
        yield own
        for decay, correction in product((0.0, 0.1), (True, False)):
            changed = {"lr": 1e-2, "weight_decay": decay, "bias_correction": correction}
            yield own | changed


def _steps_of_both(
    optimizer: Any, group: dict[str, Any], shape: TileShape, tail_width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Step the same values both ways; yield pairs of tensors that must be equal."""
    operator: Operator = optimizer.ds_opt_adam
    operator.create_adam(
        _TRIAL_NUMBER,
        group["lr"],
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        optimizer.adam_w_mode,
        False,  # no line in the log
    )
    powers = BetaPowers.at_start(group["betas"])
    generator = torch.Generator().manual_seed(_NUMEL)
    weight = _values(generator, torch.float32)
    ours = [weight, torch.zeros(_NUMEL), torch.zeros(_NUMEL)]
    theirs = [tensor.clone() for tensor in ours]
    output = None
    if shape.parameter_dtype in _DTYPES_16_BIT:
        output = torch.empty(_NUMEL, dtype=shape.parameter_dtype)
    try:
        for step in _STEPS:
            gradient, factor = _values(generator, shape.gradient_dtype), 1 / (3 * step)
            wide = gradient.float() if gradient.dtype in _DTYPES_16_BIT else gradient.clone()
            tensors = [theirs[0], wide.mul_(factor), *theirs[1:]]
            _step_stock(operator, _TRIAL_NUMBER, step, group, tensors)
            powers.advance(step, group["betas"])
            update(
                gradient=gradient,
                weight=ours[0],
                exp_avg=ours[1],
                exp_avg_sq=ours[2],
                output=output,
                coefficients=powers.coefficients(group, factor, adamw=optimizer.adam_w_mode),
                tail_numel=_NUMEL % tail_width,
            )
            yield from zip(ours, theirs, strict=True)
            if output is not None:
                yield output, theirs[0].to(output.dtype)
    finally:
        operator.destroy_adam(_TRIAL_NUMBER)


def _step_stock(
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


def _values(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return _NUMEL values: 75 % normal, the rest random bits (NaN, infinity, denormals)."""
    usual = torch.randn(_NUMEL, generator=generator).to(dtype)
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    limits = torch.iinfo(integers)
    bits = torch.randint(
        limits.min, limits.max, (_NUMEL,), generator=generator, dtype=torch.int64
    ).to(integers)
    is_usual = torch.rand(_NUMEL, generator=generator) < 0.75
    return torch.where(is_usual, usual, bits.view(dtype))


def _are_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bits; any NaN equals any other."""
    integers = torch.int32 if left.element_size() == 4 else torch.int16
    both_nan = left.isnan() & right.isnan()
    return bool((both_nan | (left.view(integers) == right.view(integers))).all())
