"""The table of known optimizers: names of a DeepSpeed JSON and of classes."""

from __future__ import annotations

import pytest

from memascend.plan.optimizers import kind_of, state_count_of
from memascend.plan.request import PlanRequest


@pytest.mark.parametrize("name", ["AdamW", "adamw", "DeepSpeedCPUAdam", "Lion"])
def test_names_are_known_however_they_are_written(name: str) -> None:
    assert kind_of(name).is_elementwise
    assert kind_of(name).states == len(kind_of(name).start) == 2


@pytest.mark.parametrize("name", ["Lamb", "NAdam", "Unheard", "my.own.AdamW"])
def test_whole_tensors_are_assumed_where_nothing_is_known(name: str) -> None:
    assert not kind_of(name).is_elementwise
    assert state_count_of(name) == 2


def test_adafactor_has_one_state_and_another_one_for_a_first_moment() -> None:
    assert not kind_of("Adafactor").is_elementwise
    assert [state_count_of("Adafactor", {"beta1": beta}) for beta in (None, 0.9)] == [1, 2]


def test_options_that_are_set_add_a_state_each() -> None:
    assert state_count_of("RMSprop", {"momentum": 0.9, "centered": True}) == 3
    assert state_count_of("SGD", {"momentum": 0.0}) == 0
    assert state_count_of("AdamW", {"amsgrad": True, "momentum": 0.9}) == 3
    assert state_count_of("a user's own AdamW", {"amsgrad": True}) == 3


def test_a_request_goes_by_its_own_field_before_the_table() -> None:
    assert PlanRequest(optimizer="AdamW").is_tiled
    assert PlanRequest(optimizer="AdamW").has_known_start
    whole = PlanRequest(optimizer="AdamW", is_elementwise=False)
    assert not whole.is_tiled
    assert not whole.has_known_start
    assert PlanRequest(optimizer="Unheard", is_elementwise=True).is_tiled
