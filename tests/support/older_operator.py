"""The compiled Adam of DeepSpeed 0.18.9 and older, as far as its powers of beta are concerned."""

from __future__ import annotations

from typing import Any

import torch


class OlderOperator:
    """Steps with the installed operator, but computes the powers anew in each repeated call.

    A call on no elements for a step far off makes the next one a jump, whose powers are computed
    with pow() in all releases.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._last: dict[int, tuple[int, float, float]] = {}

    def create_adam(self, number: int, *arguments: Any) -> int:
        self._last.pop(number, None)
        return int(self._operator.create_adam(number, *arguments))

    def destroy_adam(self, number: int) -> int:
        return int(self._operator.destroy_adam(number))

    def adam_update(
        self, number: int, step: int, lr: float, beta1: float, beta2: float, *rest: Any
    ) -> int:
        update, called = self._operator.adam_update, (step, beta1, beta2)
        if self._last.get(number) == called:
            nothing = [torch.empty(0) for _ in range(4)]
            update(number, step + 2, lr, beta1, beta2, *rest[:-4], *nothing)
        self._last[number] = called
        return int(update(number, step, lr, beta1, beta2, *rest))


def make_older(optimizer: Any) -> Any:
    """Let a DeepSpeedCPUAdam that has made no step call an older operator; return it."""
    optimizer.ds_opt_adam = OlderOperator(optimizer.ds_opt_adam)
    return optimizer
