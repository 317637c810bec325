"""The order of sub-groups in a walk in the background."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed")

from memascend.deepspeed.optimizer.upstream import Upstream
from memascend.deepspeed.optimizer.walk_order import forward_order, points_of
from tests.support.tiled_optimizer import NAMES, Swapper


def group(numel: int, ds_id: int, key: str = "") -> list[SimpleNamespace]:
    shard = SimpleNamespace(ds_numel=numel)
    return [SimpleNamespace(ds_id=ds_id, ds_tensor=shard, key=key, nvme_swapper=Swapper())]


def test_other_groups_are_walked_in_the_order_of_their_parameters() -> None:
    groups = [group(3, 20), group(8192, 10), group(20_011, 0)]
    assert forward_order(Upstream(SimpleNamespace(fp16_groups=groups))) == [0, 2, 1]


def test_what_is_about_as_large_as_all_others_keeps_its_place() -> None:
    groups = [group(9 + 2 * (number % 2), number) for number in range(100)]
    assert forward_order(Upstream(SimpleNamespace(fp16_groups=groups))) == [*range(100)]


def test_a_place_is_the_end_of_a_value_in_the_walk() -> None:
    stage3 = SimpleNamespace(
        fp16_groups=[[*group(3, 0, "a"), *group(4, 1, "b")], group(5, 2, "c")],
        fp32_partitioned_groups_flat=[SimpleNamespace(ds_id=name) for name in NAMES[:2]],
    )
    first, second = NAMES[:2]
    expected = {second: (1, 0), "c": (0, 5), first: (2, 0), "a": (1, 3), "b": (1, 7)}
    assert points_of(Upstream(stage3), [second, first]) == expected
