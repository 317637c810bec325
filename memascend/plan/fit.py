"""The longest context and the largest batch that fit, by the arithmetic of context.py.

Memory depends only on the tokens of a micro-step and of a slice, and grows with them, so the
largest number that fits is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memascend.plan.context import ContextPlan, Training, Way

#: More tokens than fit on any machine; ends the search if memory does not grow.
TOKENS_MAX = 1 << 40
DEVICE, HOST = "device memory", "host memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory for one rank."""

    device_bytes: int
    host_bytes: int | None = None  # host memory; None: unlimited

    def short(self, plan: ContextPlan) -> dict[str, int]:
        """Return the missing bytes by kind of memory; empty if the plan fits."""
        needed = {DEVICE: plan.device_bytes - self.device_bytes}
        if self.host_bytes is not None:
            needed[HOST] = plan.host_bytes - self.host_bytes
        return {name: nbytes for name, nbytes in needed.items() if nbytes > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The largest number of tokens that fits, for one way to train."""

    way: Way
    count: int  # units of tokens that fit; 0: not even one
    limits: Mapping[str, int] = field(default_factory=dict)  # bytes that one unit more lacks


def fit(
    training: Training,
    way: Way,
    *,
    room: Room,
    unit_tokens: int,
    slice_tokens_of: Callable[[int], int] | None = None,
) -> Fit:
    """Find the largest multiple of a number of tokens that fits.

    The unit is the batch for the longest context, and the context for the largest batch. Given
    `slice_tokens_of`, layers compute so many units in slices of so many tokens.
    """

    def short(count: int) -> dict[str, int]:
        slice_tokens = slice_tokens_of and slice_tokens_of(count)
        tokens, device_bytes = count * unit_tokens, room.device_bytes
        plan = training.plan(way, tokens, slice_tokens=slice_tokens, device_bytes=device_bytes)
        return room.short(plan)

    fits, ends = 0, 1
    while not short(ends):
        fits, ends = ends, 2 * ends
        if ends * unit_tokens > TOKENS_MAX:
            return Fit(way=way, count=fits)
    while ends - fits > 1:
        middle = (fits + ends) // 2
        fits, ends = (fits, middle) if short(middle) else (middle, ends)
    return Fit(way=way, count=fits, limits=short(ends))
