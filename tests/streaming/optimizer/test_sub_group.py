"""The record of a sub-group: its keys, and the forms of its master weights."""

from __future__ import annotations

import pytest
import torch

from memascend.streaming.optimizer.sub_group import MasterForm, Member, SubGroup


def in_halves(form: MasterForm = MasterForm.ROUNDED) -> SubGroup:
    members = [
        Member(offset, numel, torch.bfloat16, key=f"param.{offset}")
        for offset, numel in ((0, 10), (10, 5))
    ]
    states = {"exp_avg_sq": torch.float32}
    return SubGroup("4", 15, states, members=members, flag_state="exp_avg_sq", form=form)


def test_keys_that_a_step_writes_follow_the_form() -> None:
    assert in_halves().all_keys == ["low.4", "state.4.exp_avg_sq"]
    assert in_halves(MasterForm.EXACT).all_keys == ["low.4", "state.4.exp_avg_sq"]
    assert in_halves(MasterForm.WHOLE).all_keys == ["master.4", "state.4.exp_avg_sq"]


def test_high_halves_are_members_or_a_key_of_their_own() -> None:
    assert [*in_halves().high_runs(4, 9)] == [("param.0", 8, 6, 0), ("param.10", 0, 3, 6)]
    assert [*in_halves().high_runs(11, 2)] == [("param.10", 2, 2, 0)]
    assert [*in_halves(MasterForm.EXACT).high_runs(4, 9)] == [("high.4", 8, 9, 0)]


def test_a_form_is_followed_by_its_own_successors_alone() -> None:
    group = in_halves()
    with pytest.raises(AssertionError, match="4 is ROUNDED and cannot become ROUNDED"):
        group.become(MasterForm.ROUNDED)
    group.become(MasterForm.EXACT)
    group.become(MasterForm.WHOLE)
    with pytest.raises(AssertionError, match="4 is WHOLE and cannot become EXACT"):
        group.become(MasterForm.EXACT)


@pytest.mark.parametrize(
    ("form", "after"),
    [
        (MasterForm.EXACT, MasterForm.ROUNDED),
        (MasterForm.ROUNDED, MasterForm.ROUNDED),
        (MasterForm.WHOLE, MasterForm.WHOLE),
    ],
)
def test_a_step_writes_all_values_and_members_are_high_halves_again(
    form: MasterForm, after: MasterForm
) -> None:
    group = in_halves(form)
    group.fills[None] = 0
    group.note_stepped()
    assert group.form is after
    assert group.fills == {}
