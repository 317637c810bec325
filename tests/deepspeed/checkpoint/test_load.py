"""How a checkpoint is opened: as it lies or divided anew, for the optimizer there is.

Opening in an engine is in test_engine.py, most combinations are in tests/parity/test_divisions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed")

import torch

from memascend.checkpoint.layout import NamedParameter
from memascend.deepspeed.checkpoint import load
from memascend.deepspeed.checkpoint.load import _is_divided_otherwise, _Opener, target_of
from memascend.deepspeed.optimizer.upstream import Upstream

A, B, C = NamedParameter("a", 3), NamedParameter("b", 2), NamedParameter("c", 2)
Groups = Sequence[Sequence[NamedParameter]]


@pytest.mark.parametrize(
    ("saved", "is_divided"),
    [
        (None, False),
        ([[A], [B]], False),
        ([[B], [A]], True),
        ([[A, B]], True),
        ([[A], [C]], False),  # other names: a wrapped model
        ([[A], [B], [C]], True),
    ],
)
def test_a_checkpoint_is_divided_anew_only_where_it_has_to(
    saved: Groups | None, is_divided: bool
) -> None:
    assert _is_divided_otherwise(saved, [[A], [B]]) == is_divided


def test_an_optimizer_is_described_by_its_sub_groups() -> None:
    params = [torch.nn.Parameter(torch.empty(0)) for _ in range(2)]
    for number, (param, numel) in enumerate(zip(params, (3, 2), strict=True)):
        param.ds_id, param.ds_numel = number, numel  # type: ignore[attr-defined]
    optimizer = SimpleNamespace(
        param_names=dict(zip(params, ("a", "b"), strict=True)),
        fp16_groups=[[params[0]], [params[1]]],
        fp32_partitioned_groups_flat=[SimpleNamespace(ds_id="0_0"), SimpleNamespace(ds_id="1_1")],
        fp16_partitioned_groups_flat_numel=[2, 1],
        optimizer=SimpleNamespace(param_groups=[{}, {}]),
        master_weights_and_grads_dtype=torch.float32,
        sub_group_to_group_id={0: 1, 1: 0},
    )
    target = target_of(Upstream(optimizer))
    assert target.parameters == ((A,), (B,))
    assert (target.names, target.numels) == (["0_0", "1_1"], [2, 1])
    assert (target.groups, target.group_count) == ([1, 0], 2)
    assert target.ids == {"a": 0, "b": 1}
    assert [group["params"] for group in target.regroup([{}, {}])] == [[1], [0]]


@pytest.mark.parametrize("leads", [True, False])
def test_a_checkpoint_that_a_killed_save_moved_away_is_put_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    (tmp_path / ".memascend-here.replaced").mkdir()
    monkeypatch.setattr(load, "rank_of", lambda _: 0 if leads else 1)
    _Opener(None, None, str(tmp_path), "here").put_back()  # type: ignore[arg-type]
    assert (tmp_path / "here").is_dir() == leads
