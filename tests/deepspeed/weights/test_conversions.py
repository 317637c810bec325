"""Splitting a state dict: each merge has its tensors, and nothing is split without need."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memascend.deepspeed.weights import conversions

core_model_loading: Any = pytest.importorskip("transformers.core_model_loading")


def _apply_weight_conversions_to_state_dict() -> None:
    """Stands for the function that merges all at once, which the loader below calls."""


def loader() -> None:
    _apply_weight_conversions_to_state_dict()


def merges_one_at_a_time() -> Iterator[None]:
    yield


class Model(torch.nn.Module):
    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.experts = torch.nn.Parameter(torch.zeros(2, 2))
        self.model.others = torch.nn.Parameter(torch.zeros(2, 2))
        self.model.norm = torch.nn.Parameter(torch.zeros(2))


KEYS = ("experts.0.w", "norm", "experts.1.w", "others.0.w", "unknown", "others.1.w")


def state_dict() -> dict[str, torch.Tensor]:
    return {f"old.{key}": torch.full((1, 2), float(at)) for at, key in enumerate(KEYS)}


def mapping() -> list[Any]:
    merge = core_model_loading.MergeModulelist
    return [
        core_model_loading.WeightRenaming("^old", "model"),
        *(
            core_model_loading.WeightConverter(f"{name}.*.w", name, operations=[merge(dim=0)])
            for name in ("experts", "others")
        ),
    ]


def test_each_merge_has_its_tensors_behind_those_that_are_not_merged() -> None:
    weights = state_dict()
    config = SimpleNamespace(weight_mapping=mapping())
    parts = conversions.one_at_a_time(loader, Model(), weights, config)
    assert [list(part) for part in parts] == [
        ["old.norm", "old.unknown"],
        ["old.experts.0.w", "old.experts.1.w"],
        ["old.others.0.w", "old.others.1.w"],
    ]
    assert all(part[key] is weights[key] for part in parts for key in part)


@pytest.mark.parametrize("config", [None, SimpleNamespace(weight_mapping=mapping()[:1])])
def test_without_a_merge_nothing_is_split(config: Any) -> None:
    weights = state_dict()
    (part,) = conversions.one_at_a_time(loader, Model(), weights, config)
    assert part is weights


def test_a_loader_that_merges_one_at_a_time_or_not_at_all_gets_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, config = state_dict(), SimpleNamespace(weight_mapping=mapping())
    monkeypatch.setitem(globals(), conversions.CONVERT, merges_one_at_a_time)
    assert conversions.one_at_a_time(loader, Model(), weights, config) == [weights]
    monkeypatch.delitem(globals(), conversions.CONVERT)
    assert conversions.one_at_a_time(loader, Model(), weights, config) == [weights]


def test_the_state_dict_of_a_caller_stays_whole() -> None:
    weights = OrderedDict(state_dict())
    config = SimpleNamespace(weight_mapping=mapping())
    assert conversions.one_at_a_time(loader, Model(), weights, config) == [weights]
