"""DeepSpeedCPUAdam's step in one pass, where it gives the same bits.

What is one pass here is four in its own step: the gradient is widened and multiplied, the step is
made, and the new weight is rounded to 16 bits. Its numbers are computed as its C++ code does, in
fp32 (`csrc/includes/cpu_adam.h`). Whether the bits are equal is tried at the start, with the
operator that DeepSpeed has compiled on this machine: compilers differ in how they fuse the loop
over what no vector holds.
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
from memascend.plan.states import refusal
from memascend.streaming.tiles import TileShape
from memascend.streaming.updates import FusedUpdate

log = logging.getLogger(__name__)

#: Elements of a vector in DeepSpeed's operator: AVX2, AVX-512, NEON, fused alike everywhere, none.
TAIL_WIDTHS = (8, 16, 4, 1, 1 << 62)
_DTYPES_16_BIT = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq")
#: Of the random bits that moments in bf16 are rounded with: "memascend" on a telephone's keys.
_SEED = 636272363


class Operator(Protocol):
    """DeepSpeed's compiled cpu_adam."""

    def create_adam(self, *arguments: Any) -> int:
        """Make an optimizer of a number."""

    def adam_update(self, *arguments: Any) -> int:
        """Step one."""

    def destroy_adam(self, number: int) -> int:
        """Forget one."""


@dataclass(slots=True)
class BetaPowers:
    """The powers that DeepSpeed's optimizer carries from step to step, with their rounding.

    They are multiplied up while steps follow each other, and computed anew after a jump.
    """

    beta1: float
    beta2: float
    power1: float = 1.0
    power2: float = 1.0
    step: int = 0

    @classmethod
    def at_start(cls, betas: tuple[float, float]) -> BetaPowers:
        """Begin as an optimizer that has just been made."""
        return cls(fp32(betas[0]), fp32(betas[1]))

    def advance(self, step: int, betas: tuple[float, float]) -> None:
        """Go to a step; the next, the same, or any other."""
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
        """Return the numbers of this step; betas are below 1."""
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
    """The steps of one DeepSpeedCPUAdam, and its running powers."""

    def __init__(
        self,
        optimizer: Any,
        tail_width: int,
        state_dtype: torch.dtype = torch.float32,
        rank: int = 0,
        *,
        is_needed: bool,
    ) -> None:
        """Begin where the optimizer is, which has not made a step yet.

        Args:
            optimizer: DeepSpeedCPUAdam.
            tail_width: As `find_tail_width` has found it.
            state_dtype: Of its moments.
            rank: Of this process.
            is_needed: Whether a step that the optimizer must do itself is an error.
        """
        self._optimizer = optimizer
        self._tail_width = tail_width
        self._state_dtype = state_dtype
        self._rank = rank
        self._is_needed = is_needed
        self._powers = BetaPowers.at_start(optimizer.defaults["betas"])
        self._nothing = [torch.empty(0) for _ in range(4)]
        self._helpers = KernelHelpers()  # joined when this goes

    def advance(self, step: int, betas: tuple[float, float]) -> None:
        """Follow the optimizer's operator to a step that somebody else has called it for."""
        self._powers.advance(step, betas)

    def of(
        self,
        group: Mapping[str, Any],
        values: Mapping[str, Any],
        states: Mapping[str, torch.dtype],
        sub_group: int = 0,
    ) -> FusedUpdate | None:
        """Return the update of a sub-group's tiles; None for what the optimizer must do itself.

        Args:
            group: Its hyperparameters, as they are now.
            values: The optimizer's state of it.
            states: Dtypes of its state tensors.
            sub_group: Its number; with moments in bf16 others are rounded with other random bits.

        Raises:
            ConfigError: The optimizer must, and cannot.
        """
        reason = self.why_not(group, values, states)
        if not reason:
            return partial(self._update, dict(group), sub_group)
        if self._is_needed:
            raise refusal(reason, "Change that")
        return None

    def early(self, coming: Iterable[tuple[Mapping[str, Any], int]]) -> list[FusedUpdate]:
        """Return updates of a step that may come; neither they nor this change the optimizer.

        Args:
            coming: Of each sub-group in order its hyperparameters, and the number of its step.
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
        """Return why the optimizer must step by itself; nothing if it need not."""
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
        """Step, and bring the optimizer's own numbers to this step."""
        values["step"] += 1
        self.advance(values["step"], group["betas"])
        optimizer = self._optimizer
        # Steps nothing, but goes to this step too: a later step may be its own.
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


def fused_adam(
    optimizer: Any, shape: TileShape, rank: int = 0, *, is_needed: bool = False
) -> FusedAdam | None:
    """Return the fused steps of an optimizer; None where its own are to be taken.

    Args:
        optimizer: Any; one that has not made a step yet.
        shape: Dtypes of its tiles.
        rank: Of this process: others round moments in bf16 with other random bits.
        is_needed: Whether the block asks for moments in bf16, which only fused steps serve. The
            dtype does not say so: it is bf16 too where DeepSpeed keeps states in it.

    Raises:
        ConfigError: They are needed, and cannot be had.
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
    return None


def _why_not_fused(optimizer: Any, shape: TileShape, *, is_needed: bool) -> str:
    """Return why an optimizer must step by itself; nothing if it need not, or not in every step."""
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

#: Whole vectors of every width in TAIL_WIDTHS, and a tail of every width.
_NUMEL = 5 * 64 + 15
#: DeepSpeed numbers its own from 0 on.
_TRIAL_NUMBER = -1
#: One after the other, the same again, and a jump, as after a checkpoint.
_STEPS = (1, 2, 2, 3, 1000, 1001)


def find_tail_width(optimizer: Any, shape: TileShape) -> int | None:
    """Return the width with which fused steps give the bits of DeepSpeed's operator, if any does.

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
    """Yield the optimizer's own hyperparameters, and some that a scheduler may come to."""
    for group in optimizer.param_groups:
        own = {name: value for name, value in group.items() if name != "params"}
        yield own
        for decay, correction in product((0.0, 0.1), (True, False)):
            changed = {"lr": 1e-2, "weight_decay": decay, "bias_correction": correction}
            yield own | changed


def _steps_of_both(
    optimizer: Any, group: dict[str, Any], shape: TileShape, tail_width: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Step the same values both ways; yield what must be equal, step by step."""
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
    """Return numbers of usual sizes, and among them some of any bits: NaN, infinity, denormals."""
    usual = torch.randn(_NUMEL, generator=generator).to(dtype)
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    limits = torch.iinfo(integers)
    bits = torch.randint(
        limits.min, limits.max, (_NUMEL,), generator=generator, dtype=torch.int64
    ).to(integers)
    is_usual = torch.rand(_NUMEL, generator=generator) < 0.75
    return torch.where(is_usual, usual, bits.view(dtype))


def _are_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bits; of a NaN only that it is one."""
    integers = torch.int32 if left.element_size() == 4 else torch.int16
    both_nan = left.isnan() & right.isnan()
    return bool((both_nan | (left.view(integers) == right.view(integers))).all())
