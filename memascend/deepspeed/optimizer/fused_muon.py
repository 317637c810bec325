"""Fused steps of DeepSpeed's Muon: weights by the updates of its matrices, CPU Adam for the others.

The operations on matrices are those of its `step()`, in its order; the updates were made before.
So they know neither whole matrices nor momentum, and weights may be in halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from memascend.deepspeed.optimizer.beta_powers import BetaPowers, Call
from memascend.deepspeed.optimizer.fused_adam import FusedAdam, Inputs, OwnSteps, fused_adam
from memascend.deepspeed.optimizer.plain_adam import why_not_plain_step
from memascend.plan.optimizer_dtypes import BF16_8, refusal_of_muon
from memascend.plan.optimizers import is_muon
from memascend.streaming.optimizer.sub_group_step import FusedUpdate
from memascend.streaming.optimizer.tile_memory import TileShape


def fused_steps(
    optimizer: Any, shape: TileShape, rank: int = 0, *, is_wanted: bool, **options: Any
) -> FusedAdam | FusedMuon | OwnSteps:
    """Return the fused steps of an optimizer, Muon or not, or its own ones; see `fused_adam`.

    Raises:
        ConfigError: Fused steps of Adam are needed and not possible, or master weights of 24 bits
            are asked for.
    """
    if is_muon(type(optimizer).__name__):
        if BF16_8 in options["fewer"]:
            raise refusal_of_muon()
        adam: FusedAdam | OwnSteps = OwnSteps()
        if (other := optimizer.aux_optimizer) is not None:
            adam = fused_adam(other, shape, rank, is_wanted=is_wanted, caller=optimizer, **options)
        return FusedMuon(optimizer, adam) if is_wanted else adam
    return fused_adam(optimizer, shape, rank, is_wanted=is_wanted, **options)


class FusedMuon:
    """Fused steps of one MuonWithAuxAdam."""

    def __init__(self, optimizer: Any, adam: FusedAdam | OwnSteps) -> None:
        """Take an optimizer, and the steps of its other parameters.

        Args:
            optimizer: MuonWithAuxAdam.
            adam: Steps of its `aux_optimizer`; its own ones if it has none.
        """
        self._optimizer, self._adam = optimizer, adam

    def fuses(self, group: Mapping[str, Any]) -> bool:
        """Return whether steps of a parameter group are fused."""
        return bool(group["use_muon"]) or self._adam.is_fused

    @property
    def is_fused(self) -> bool:
        """Whether steps of all parameters may be fused."""
        return self._optimizer.aux_optimizer is None or self._adam.is_fused

    @property
    def powers(self) -> BetaPowers | None:
        """Running powers of Adam's betas; None if they are unknown."""
        return self._adam.powers

    def updates(self, sub_groups: Sequence[Inputs]) -> list[FusedUpdate | None]:
        """Return the update of each sub-group's tiles in one step; see `FusedAdam.updates`.

        Raises:
            ConfigError: Adam must step by itself, and that is refused.
        """
        others = iter(self._adam.updates([one for one in sub_groups if not one[0]["use_muon"]]))
        is_plain = not why_not_plain_step(self._optimizer)
        return [
            (update_of(group) if is_plain else None) if group["use_muon"] else next(others)
            for group, _, _ in sub_groups
        ]

    def early(self, coming: Iterable[Call]) -> list[FusedUpdate]:
        """Return the updates of a step that DeepSpeed may still skip; see `FusedAdam.early`.

        `why_not` has to be empty for each sub-group.
        """
        calls = list(coming)
        others: Iterator[FusedUpdate] = iter(())
        if of_adam := [one for one in calls if not one[0]["use_muon"]]:
            assert isinstance(self._adam, FusedAdam)
            others = iter(self._adam.early(of_adam))
        return [
            _plain_update_of(group) if group["use_muon"] else next(others) for group, _ in calls
        ]

    def why_not(
        self,
        group: Mapping[str, Any],
        values: Mapping[str, Any],
        states: Mapping[str, torch.dtype],
    ) -> str:
        """Return why the optimizer must step by itself; empty if a fused step can replace it.

        Call it only if `is_fused`.
        """
        if not group["use_muon"]:
            assert isinstance(self._adam, FusedAdam)
            return self._adam.why_not(group, values, states)
        if update_of(group) is None:
            return f"lr or weight_decay is no number: {group['lr']}, {group['weight_decay']}"
        return why_not_plain_step(self._optimizer)


def _plain_update_of(group: Mapping[str, Any]) -> FusedUpdate:
    update = update_of(group)
    assert update is not None
    return update


def update_of(group: Mapping[str, Any]) -> FusedUpdate | None:
    """Return the step of matrices; None for hyperparameters that may change behind the step."""
    rate, decay = group["lr"], group["weight_decay"]
    if not isinstance(rate, (int, float)) or not isinstance(decay, (int, float)):
        return None
    return partial(_step, 1 - rate * decay, -rate)


def _step(
    kept: float, rate: float, *, gradient: torch.Tensor, weight: torch.Tensor, **unused: Any
) -> None:
    """Step weights by updates, as `MuonWithAuxAdam.step`."""
    weight.mul_(kept)
    weight.add_(gradient, alpha=rate)
