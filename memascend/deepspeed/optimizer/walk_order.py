"""The order in which sub-groups are stepped, and the points of values in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.streaming.background import WalkPoint

#: Sub-groups that count as small hold at most this fraction of all elements.
SMALL_PART = 0.01


def forward_order(upstream: Upstream) -> list[int]:
    """Return the sub-group numbers in the order in which a forward pass needs them.

    Small sub-groups come first, then all others by their first parameter. Norms and biases are
    often a parameter group of their own, after the others, and every layer needs a part of it.
    """
    groups = upstream.params
    numels = [sum(param.ds_tensor.ds_numel for param in group) for group in groups]
    ascending = sorted(range(len(numels)), key=numels.__getitem__)
    sums = itertools.accumulate(numels[number] for number in ascending)
    small_numel = SMALL_PART * sum(numels)
    small = {number for number, end in zip(ascending, sums, strict=True) if end <= small_numel}
    return sorted(ascending, key=lambda number: (number not in small, groups[number][0].ds_id))


def points_of(upstream: Upstream, order: Sequence[str]) -> dict[str, WalkPoint]:
    """Return the point in the walk at which each parameter and each sub-group is written.

    Args:
        upstream: The optimizer; its parameters are in our swapper.
        order: Names of sub-groups as they are stepped.
    """
    swapper = upstream.parameter_swapper
    assert swapper is not None
    params = dict(zip(upstream.names, upstream.params, strict=True))
    points: dict[str, WalkPoint] = {}
    for index, name in enumerate(order):
        points[name] = (index + 1, 0)
        end = 0
        for param in params[name]:
            end += param.ds_tensor.ds_numel
            points[swapper.key(param)] = (index, end)
    return points
