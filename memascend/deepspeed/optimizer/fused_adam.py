"""The fused step: DeepSpeedCPUAdam's step in one pass, if it gives the same bits.

DeepSpeed needs four passes: widen the gradient, multiply it, step, and round the new weight to 16
bits. The coefficients are computed in fp32 as in its C++ code (`csrc/includes/cpu_adam.h`). At the
start the bits are compared with those of the operator that DeepSpeed has compiled on this machine,
since compilers contract the scalar remainder loop differently.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from memascend.deepspeed.optimizer.beta_powers import (
    TELLING_BETAS,
    TRIAL_NUMBER,
    BetaPowers,
    Call,
    Operator,
    call,
    create_trial,
    powers_of,
    recomputes_powers,
)
from memascend.deepspeed.optimizer.plain_adam import (
    fp32,
    why_not_plain_numbers,
    why_not_plain_step,
)
from memascend.errors import ConfigError
from memascend.kernels.adam import (
    AdamCoefficients,
    KernelHelpers,
    make_rounding_key,
    update,
)
from memascend.kernels.halves import cut, join, round_high
from memascend.plan.optimizer_dtypes import refusal_of_fewer
from memascend.plan.release import refusal_of_tiles
from memascend.streaming.optimizer.sub_group import is_code
from memascend.streaming.optimizer.sub_group_step import FusedUpdate
from memascend.streaming.optimizer.tile_memory import TileShape

log = logging.getLogger(__name__)

#: Elements of a vector in DeepSpeed's operator: AVX2, AVX-512, NEON; 1: the remainder is computed
#: like a vector; the last: there are no vectors, all is remainder.
TAIL_WIDTHS = (8, 16, 4, 1, 1 << 62)
_DTYPES_16_BIT = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq")
#: The moment that is never negative.
FLAG_STATE = MOMENTS[1]
#: Seed of stochastic rounding: "memascend" on a telephone's keys.
_SEED = 636272363

#: Hyperparameters of a sub-group, the optimizer's state of it, and dtypes of its state tensors.
Inputs = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, torch.dtype]]
#: Returns the error for a step that cannot be fused, for a reason.
Refuse = Callable[[str], ConfigError]


def coefficients(
    powers: BetaPowers, group: Mapping[str, Any], factor: float, *, adamw: bool
) -> AdamCoefficients:
    """Return the coefficients of a step; betas are below 1."""
    rate, decay = fp32(group["lr"]), fp32(group["weight_decay"])
    correction1 = root_scale = 1.0
    if group["bias_correction"]:
        correction1 = fp32(1.0 - powers.power1)
        root_scale = fp32(1.0 / fp32(math.sqrt(fp32(1.0 - powers.power2))))
    decays = decay > 0
    return AdamCoefficients(
        factor=factor,
        beta1=powers.beta1,
        beta2=powers.beta2,
        take1=fp32(1.0 - powers.beta1),
        take2=fp32(1.0 - powers.beta2),
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
        moments: Mapping[str, torch.dtype] | None = None,
        rank: int = 0,
        *,
        recomputes: bool,
        refuse: Refuse | None = None,
        caller: Any = None,
    ) -> None:
        """Take an optimizer that has not made a step yet.

        Args:
            optimizer: DeepSpeedCPUAdam.
            tail_width: Result of `find_tail_width`.
            moments: Dtypes of its moments by name; None: fp32.
            rank: Rank of this process.
            recomputes: Result of `recomputes_powers`.
            refuse: Returns the error to raise if a step cannot be fused; None: the optimizer then
                steps by itself.
            caller: Optimizer whose `step()` calls this one's; None: there is none.
        """
        self._optimizer, self._caller = optimizer, caller
        self._tail_width = tail_width
        self._moments = moments or dict.fromkeys(MOMENTS, torch.float32)
        self._has_codes = any(map(is_code, self._moments.values()))
        self._rank = rank
        self._refuse = refuse
        self._powers = BetaPowers.at_start(optimizer.defaults["betas"], recomputes=recomputes)
        self._nothing = [torch.empty(0) for _ in range(4)]
        self._helpers = KernelHelpers()  # joined when this object is freed
        #: Whether steps may be fused: until the optimizer has made one by itself, since its running
        #: powers are then unknown.
        self.is_fused = True

    @property
    def powers(self) -> BetaPowers | None:
        """Running powers of its betas; None once the optimizer has made a step by itself."""
        return self._powers if self.is_fused else None

    def fuses(self, group: Mapping[str, Any]) -> bool:
        """Return whether steps of a parameter group may be fused."""
        return self.is_fused

    def updates(self, sub_groups: Sequence[Inputs]) -> list[FusedUpdate | None]:
        """Return the update of each sub-group's tiles in one step.

        Args:
            sub_groups: All sub-groups, in DeepSpeed's order. Their tiles may be stepped in any.

        Returns:
            An update for each; None from the first on that the optimizer must step by itself.

        Raises:
            ConfigError: The optimizer must step by itself, and that is refused.
        """
        calls: list[Call] = []
        for group, values, states in sub_groups if self.is_fused else ():
            reason = self.why_not(group, values, states)
            if reason and self._refuse is not None:
                raise self._refuse(reason)
            if reason:
                self.is_fused = False
                break
            # Copied: the script may change a list of betas in place behind the step.
            calls.append(({**group, "betas": (*group["betas"],)}, values["step"] + 1))
        # Called when the first tile is stepped: until then an error leaves everything unchanged.
        all_powers = functools.cache(partial(self._call_operator, calls))
        updates: list[FusedUpdate | None] = [None] * len(sub_groups)
        for number, (group, _) in enumerate(calls):
            updates[number] = partial(self._update, group, number, all_powers)
        return updates

    def early(self, coming: Iterable[Call]) -> list[FusedUpdate]:
        """Return the updates of a step that DeepSpeed may still skip.

        Neither this call nor the updates change the optimizer.

        Args:
            coming: (hyperparameters, number of the step) for each sub-group, in order.
        """
        calls = [(dict(group), step) for group, step in coming]
        followed = replace(self._powers).follow(calls)
        return [
            partial(self._apply, group, number, powers)
            for number, ((group, _), powers) in enumerate(zip(calls, followed, strict=True))
        ]

    def why_not(
        self,
        group: Mapping[str, Any],
        values: Mapping[str, Any],
        states: Mapping[str, torch.dtype],
    ) -> str:
        """Return why the optimizer must step by itself; empty if a fused step can replace it."""
        if states != self._moments:
            return f"its states are {dict(states)}, not {dict(self._moments)}"
        if type(values.get("step")) is not int:
            return f"its count of steps is {values.get('step')!r}, not a whole number"
        reason = why_not_plain_numbers(group) or why_not_plain_step(self._optimizer)
        if not reason and self._caller is not None:
            reason = why_not_plain_step(self._caller)
        return reason

    def _call_operator(self, calls: Sequence[Call]) -> list[BetaPowers]:
        """Call the operator once for each sub-group, as stock's step; return the powers of each.

        On empty tensors: it may make a later step itself.
        """
        optimizer = self._optimizer
        for group, step in calls:
            call(optimizer.ds_opt_adam, optimizer.opt_id, step, group, self._nothing)
        return list(self._powers.follow(calls))

    def _update(
        self,
        group: Mapping[str, Any],
        sub_group: int,
        all_powers: Callable[[], Sequence[BetaPowers]],
        *,
        values: MutableMapping[str, Any],
        **tensors: Any,
    ) -> None:
        """Step, and advance the optimizer's count of steps and running powers."""
        powers = all_powers()[sub_group]
        values["step"] = powers.step
        self._apply(group, sub_group, powers, values=values, **tensors)

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
        scales: torch.Tensor | None = None,
        output: torch.Tensor | None,
    ) -> None:
        adamw = self._optimizer.adam_w_mode
        update(
            gradient=gradient,
            weight=weight,
            exp_avg=values["exp_avg"],
            exp_avg_sq=values["exp_avg_sq"],
            scales=scales if self._has_codes else None,
            output=output,
            coefficients=coefficients(powers, group, factor, adamw=adamw),
            tail_numel=0 if self._has_codes else gradient.numel() % self._tail_width,
            rounding_key=make_rounding_key(_SEED, powers.step, sub_group, self._rank),
            first_index=begin,
            helpers=self._helpers,
        )


class OwnSteps:
    """An optimizer that makes every step by itself: nothing is fused."""

    is_fused = False

    def __init__(self, powers: BetaPowers | None = None) -> None:
        """Take the running powers of a DeepSpeedCPUAdam that has not made a step yet."""
        self.powers = powers

    def fuses(self, group: Mapping[str, Any]) -> bool:
        """Return that no step is fused."""
        return False

    def updates(self, sub_groups: Sequence[Inputs]) -> list[FusedUpdate | None]:
        """Return no update, and follow the calls of the step."""
        if self.powers is not None:
            for group, values, _ in sub_groups:
                self.powers.advance(int(values.get("step", 0)) + 1, group["betas"])
        return [None] * len(sub_groups)


def fused_adam(
    optimizer: Any,
    shape: TileShape,
    rank: int = 0,
    *,
    is_wanted: bool = True,
    fewer: str = "",
    largest_numel: int = 0,
    caller: Any = None,
) -> FusedAdam | OwnSteps:
    """Return the fused steps of an optimizer, or its own ones.

    Args:
        optimizer: Any optimizer; only a DeepSpeedCPUAdam without steps so far can be fused.
        shape: Shape of its tiles.
        rank: Rank of this process; selects the random bits that round values to fewer bits.
        is_wanted: Whether the block has fused steps on.
        fewer: Settings of the block that round values in fused steps, which they need; empty if
            there are none. The dtype in `shape` cannot tell: it is bf16 too if DeepSpeed itself
            keeps states in bf16.
        largest_numel: Elements of the largest sub-group.
        caller: As of `FusedAdam`.

    Raises:
        ConfigError: Fused steps are needed and not possible.
    """
    is_adam = type(optimizer) is DeepSpeedCPUAdam
    recomputes = is_adam and recomputes_powers(optimizer.ds_opt_adam)
    refuse: Refuse | None = None
    if fewer:
        refuse = partial(refusal_of_fewer, fewer, remedy="Change that")
    elif recomputes and largest_numel > shape.numel:
        refuse = refusal_of_tiles
    reason = "streaming.optimizer.fused is false"
    if is_wanted:
        reason = _why_not_fused(optimizer, shape, is_needed=refuse is not None)
    if not reason:
        tail_width = find_tail_width(optimizer, shape, recomputes=recomputes)
        if tail_width is not None:
            return FusedAdam(
                optimizer,
                tail_width,
                shape.moments or dict.fromkeys(MOMENTS, shape.state_dtype),
                rank,
                recomputes=recomputes,
                refuse=refuse,
                caller=caller,
            )
        reason = "on this machine DeepSpeed's operator gives other bits"
    if refuse is not None:
        raise refuse(reason)
    if is_adam and is_wanted and dist.get_rank() == 0:
        log.info("memascend: the optimizer's own step is used, not the fused one: %s", reason)
    return OwnSteps(powers_of(optimizer))


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
#: Consecutive steps, repeated ones, and a jump, as after loading a checkpoint.
_STEPS = (1, 2, 2, 3, 3, 4, 1000, 1001)


def find_tail_width(optimizer: Any, shape: TileShape, *, recomputes: bool) -> int | None:
    """Return the vector width for which fused steps equal DeepSpeed's bits; None if none does.

    Args:
        optimizer: A DeepSpeedCPUAdam; not stepped.
        shape: Dtypes of its tiles.
        recomputes: Result of `recomputes_powers`. With a wrong one no width serves.
    """
    for width in TAIL_WIDTHS:
        if all(
            _are_equal(ours, theirs)
            for group in _groups_to_try(optimizer)
            for ours, theirs in _steps_of_both(
                optimizer, group, shape, width, recomputes=recomputes
            )
        ):
            return width
    return None


def _groups_to_try(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the optimizer's own hyperparameters, some that a scheduler may set, and other betas."""
    for group in optimizer.param_groups:
        own = {name: value for name, value in group.items() if name != "params"}
        yield own
        for decay, correction in product((0.0, 0.1), (True, False)):
            changed = {"lr": 1e-2, "weight_decay": decay, "bias_correction": correction}
            yield own | changed
        yield own | {"lr": 1e-2, "betas": TELLING_BETAS, "bias_correction": True}


def _steps_of_both(
    optimizer: Any,
    group: dict[str, Any],
    shape: TileShape,
    tail_width: int,
    *,
    recomputes: bool,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Step the same values both ways; yield pairs of tensors that must be equal."""
    operator: Operator = optimizer.ds_opt_adam
    create_trial(operator, group, adamw=optimizer.adam_w_mode)
    powers = BetaPowers.at_start(group["betas"], recomputes=recomputes)
    generator = torch.Generator().manual_seed(_NUMEL)
    weight = _values(generator, torch.float32)
    ours = [weight, torch.zeros(_NUMEL), torch.zeros(_NUMEL)]
    theirs = [tensor.clone() for tensor in ours]
    output = None
    if shape.parameter_dtype in _DTYPES_16_BIT:
        output = torch.empty(_NUMEL, dtype=shape.parameter_dtype)
    in_halves = _InHalves(weight) if shape.parameter_dtype == torch.bfloat16 else None
    try:
        for step in _STEPS:
            gradient, factor = _values(generator, shape.gradient_dtype), 1 / (3 * step)
            wide = gradient.float() if gradient.dtype in _DTYPES_16_BIT else gradient.clone()
            tensors = [theirs[0], wide.mul_(factor), *theirs[1:]]
            call(operator, TRIAL_NUMBER, step, group, tensors)
            powers.advance(step, group["betas"])
            step_ours = partial(
                update,
                gradient=gradient,
                coefficients=coefficients(powers, group, factor, adamw=optimizer.adam_w_mode),
                tail_numel=_NUMEL % tail_width,
            )
            step_ours(weight=ours[0], exp_avg=ours[1], exp_avg_sq=ours[2], output=output)
            yield from zip(ours, theirs, strict=True)
            if in_halves is not None:
                yield from zip(in_halves.step(step_ours), theirs, strict=True)
            if output is not None:
                yield output, theirs[0].to(output.dtype)
    finally:
        operator.destroy_adam(TRIAL_NUMBER)


class _InHalves:
    """The same values with the weights in halves."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._high = torch.empty(_NUMEL, dtype=torch.bfloat16)
        self._low = torch.empty(_NUMEL, dtype=torch.int16)
        self._moments = [torch.zeros(_NUMEL), torch.zeros(_NUMEL)]
        cut(weight, self._high, self._low)
        round_high(self._high, self._low, self._moments[1])

    def step(self, update: Callable[..., None]) -> list[torch.Tensor]:
        """Step, and return the whole weights and the moments."""
        first, second = self._moments
        update(weight=self._low, exp_avg=first, exp_avg_sq=second, output=self._high)
        whole = torch.empty(_NUMEL)
        join(self._high, self._low, second, whole)
        return [whole, first, second.abs()]


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
